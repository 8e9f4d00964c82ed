"""Any ownership of any tensors, as a source: for tests of ranks that hold parts of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rdt_plan import AxisPlacement, ParamMeta
from rdt_trainer.source import SourceMeta
from rdt_transport.pack import torch_dtype
from rdt_transport.testing.fleet import piece

__all__ = ["PieceSource"]


class PieceSource:
    """A `LocalWeightSource` of one rank that cuts its pieces out of whole tensors.

    Args:
        params: who holds what of each name, the same on every rank.
        rank: whose pieces are yielded.
        tensors: by name, whole; only those of which this rank holds something are looked up, in
            every pass anew.
        meanwhile: called with each name before its piece is yielded; may raise or wait.
    """

    def __init__(
        self,
        params: Sequence[ParamMeta],
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        meanwhile: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.meanwhile = meanwhile
        self._params = params
        self._rank = rank
        self._tensors = tensors

    @property
    def metadata(self) -> list[SourceMeta]:
        return [
            SourceMeta(
                param.name,
                torch_dtype(param.dtype),
                param.shape,
                param.owners,
                param.mesh_shape,
                tuple(map(AxisPlacement.parse, param.placements)),
            )
            for param in self._params
        ]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for param in self._params:
            if (box := param.box(self._rank)) is not None:
                self.meanwhile(param.name)
                yield param.name, piece(self._tensors[param.name], box).contiguous()
