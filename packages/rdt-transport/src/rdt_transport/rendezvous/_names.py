"""The names of a job's manifest, by which its chunk tables number them."""

from collections.abc import Mapping, Sequence
from itertools import count

from rdt_plan import Manifest, WireFormatError
from rdt_plan.wire import manifest_names

__all__ = ["Names"]


class Names:
    """Those of the manifest that a client published or fetched last; any thread may ask."""

    def __init__(self) -> None:
        self._encoded = b""
        self._names: Sequence[str] | None = ()
        self._manifest: Manifest | None = None

    def learn(self, manifest: Manifest | bytes) -> None:
        """Of a manifest; if it is encoded, its names are read when they are asked for."""
        if isinstance(manifest, Manifest):
            self._encoded, self._names, self._manifest = b"", manifest.names, manifest
        else:
            self._encoded, self._names, self._manifest = manifest, None, None

    def in_order(self) -> Sequence[str]:
        """None before `learn`, or of what is no manifest: then nobody numbers names."""
        if (names := self._names) is None:
            try:
                names = manifest_names(self._encoded)
            except WireFormatError:
                names = ()
            self._names = names
        return names

    def numbers(self) -> Mapping[str, int]:
        """The position of each."""
        if (manifest := self._manifest) is not None:
            return manifest.numbers
        return dict(zip(self.in_order(), count(), strict=False))
