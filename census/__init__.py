"""Which of vLLM's architectures can be synced: each is built tiny, recorded, replayed, compared.

``python -m census`` writes the tables in ``docs/``. Nothing here is imported by a package.
"""

__all__: list[str] = []
