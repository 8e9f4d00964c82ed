"""What the tests and the demo of this project use, and what proves a deployment of yours.

Nothing is imported here: `exactness` runs inside a vLLM worker, `tiny_models` needs transformers,
`report` and `serving` run beside the engine.
"""

__all__: list[str] = []
