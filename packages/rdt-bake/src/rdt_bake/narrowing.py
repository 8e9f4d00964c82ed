"""Computing only what lands: registers shrink to the boxes of them that anything reads.

A loader casts a whole weight and then takes this rank's rows of it. What reads a register asks for
a box of it; an operation that works element by element asks for the same box of its operands, and
so on back to the weights, until nothing changes any more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rdt_bake.layouts import Layout, Piece
from rdt_bake.nodes import Node, brought, mapped
from rdt_bake.origins import Computed, View
from rdt_bake.pointwise import dense_stride, frame, part_of
from rdt_bake.regions import Box

__all__ = ["layout_of", "narrowed"]


def narrowed(nodes: Sequence[Node]) -> list[Node]:
    """``nodes`` that make the same of what lands, and read no more than that needs."""
    narrowing = _Narrowing(nodes)
    narrowing.settle()
    return list(narrowing.nodes())


class _Narrowing:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._frames = [frame(node) for node in nodes]
        self._boxes: dict[Computed, list[Box]] = {}
        self._layouts: dict[Computed, Layout | None] = {}
        self._pieces: dict[View, Piece | None] = {}
        self._small: dict[tuple[Computed, Box], Computed] = {}
        self._whole: set[Computed] = set()
        for node, made in zip(nodes, self._frames, strict=True):
            if made is None or (node.writes and self._axes(made) is None):
                self._whole.update(_touched(node))

    # -- which boxes are needed -------------------------------------------------------------------

    def settle(self) -> None:
        """Finds the boxes of every register that anything reads."""
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(self._nodes))):
                for part in self._parts(number):
                    for view in _operands(part):
                        changed |= self._ask(view)

    def _parts(self, number: int) -> Iterator[Node]:
        """What of a node must run: all of it, or itself on parts of its operands."""
        node, made = self._nodes[number], self._frames[number]
        if made is None or type(made.origin) is not Computed or made.origin in self._whole:
            yield node
            return
        for box in self._boxes.get(made.origin, ()):
            inside = self._inside(made, box) if node.writes else box
            if inside is None:
                continue
            args, kwargs = part_of(node, made, inside)
            results = () if node.writes else (self._narrow(made.origin, box),)
            writes = (args[0],) if node.writes else ()
            yield replace(node, args=args, kwargs=kwargs, results=results, writes=writes)

    def _ask(self, view: View) -> bool:
        """Notes that ``view`` is read; whether that asks for more than before."""
        made = view.origin
        if type(made) is not Computed or made in self._whole or 0 in view.shape:
            return False
        piece = self._piece(view)
        if piece is None:
            self._whole.add(made)
            return True
        asked, boxes = piece.spans(), self._boxes.setdefault(made, [])
        if any(_holds(box, asked) for box in boxes):
            return self._rebased(view) is None and not self._whole.add(made)
        while True:
            met = next((box for box in boxes if _meets(box, asked)), None)
            if met is None:
                break
            boxes.remove(met)
            asked = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(met, asked, strict=True))
        boxes.append(asked)
        if all((lo, hi) == (0, n) for (lo, hi), n in zip(asked, made.shape, strict=True)):
            self._whole.add(made)
        return True

    def _piece(self, view: View) -> Piece | None:
        """Where ``view`` lies in its register's dims; None when it steps unevenly through them."""
        if view not in self._pieces:
            made, found = view.origin, None
            assert type(made) is Computed
            if made not in self._layouts:
                self._layouts[made] = layout_of(made)
            layout = self._layouts[made]
            if layout is not None and view.dtype.itemsize == made.dtype.itemsize:
                found = layout.trace(view.offset, view.shape, view.stride)
            self._pieces[view] = found[0] if found is not None and len(found) == 1 else None
        return self._pieces[view]

    # -- views of parts ---------------------------------------------------------------------------

    def _axes(self, made: View) -> dict[int, tuple[int, int]] | None:
        """For a view that a node writes into: by dim of the register, its axis and steps there."""
        if type(made.origin) is not Computed:
            return {}
        if 0 in made.shape:
            return None
        piece = self._piece(made)
        if piece is None:
            return None
        axes: dict[int, tuple[int, int]] = {}
        for (axis, _), move, extent in zip(piece.steps, piece.moves, piece.shape, strict=True):
            moving = [dim for dim, by in enumerate(move) if by]
            if len(moving) != 1 or moving[0] in axes or extent != made.shape[axis]:
                return None
            axes[moving[0]] = axis, move[moving[0]]
        return axes

    def _inside(self, made: View, box: Box) -> Box | None:
        """The part of the written view ``made`` that lies in ``box`` of its register."""
        piece, axes = self._piece(made), self._axes(made)
        assert piece is not None and axes is not None
        inside = [(0, extent) for extent in made.shape]
        for dim, (first, (lo, hi)) in enumerate(zip(piece.index, box, strict=True)):
            if dim not in axes:
                if not lo <= first < hi:
                    return None
                continue
            axis, step = axes[dim]
            start = max(-((first - lo) // step), 0)
            stop = min(-((first - hi) // step), made.shape[axis])
            if start >= stop:
                return None
            inside[axis] = (start, stop)
        return tuple(inside)

    def _narrow(self, made: Computed, box: Box) -> Computed:
        """The register that holds ``box`` of ``made``."""
        if (made, box) not in self._small:
            shape = tuple(hi - lo for lo, hi in box)
            stride = dense_stride(shape, made.stride)
            self._small[made, box] = replace(made, shape=shape, stride=stride)
        return self._small[made, box]

    def _rebased(self, view: View) -> View | None:
        """The same elements in the register of the box that holds them."""
        made = view.origin
        if type(made) is not Computed or made in self._whole:
            return view
        if 0 in view.shape:
            return brought(torch.empty(view.shape, dtype=view.dtype))
        piece = self._piece(view)
        assert piece is not None
        box = next(box for box in self._boxes[made] if _holds(box, piece.spans()))
        small = self._narrow(made, box)
        offset = sum(
            (at - lo) * step
            for at, (lo, _), step in zip(piece.index, box, small.stride, strict=True)
        )
        stride = [0] * len(view.shape)
        for (axis, step), move in zip(piece.steps, piece.moves, strict=True):
            jump = sum(by * own for by, own in zip(move, small.stride, strict=True))
            if jump % step or stride[axis] not in (0, jump // step):
                return None
            stride[axis] = jump // step
        return View(small, view.dtype, offset, view.shape, tuple(stride))

    # -- the narrowed trace -----------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """The trace on narrow registers; call it once settled."""
        for number in range(len(self._nodes)):
            for part in self._parts(number):
                yield _changed(part, self._rebased)


def _changed(node: Node, change: Callable[[View], View | None]) -> Node:
    new: dict[int, View] = {}

    def changed(value: Any) -> Any:
        if not isinstance(value, View):
            return value
        if id(value) not in new:
            found = change(value)
            assert found is not None
            new[id(value)] = found
        return new[id(value)]

    return replace(
        node,
        args=tuple(mapped(argument, changed) for argument in node.args),
        kwargs={key: mapped(argument, changed) for key, argument in node.kwargs.items()},
        writes=tuple(changed(view) for view in node.writes),
    )


def layout_of(made: Computed) -> Layout | None:
    """The layout of a register; None when it overlaps itself."""
    try:
        return Layout(made.shape, made.stride)
    except ValueError:
        return None


def _touched(node: Node) -> Iterator[Computed]:
    for origin in (*node.results, *(view.origin for view in node.writes)):
        if type(origin) is Computed:
            yield origin


def _operands(node: Node) -> Iterable[View]:
    return (view for view in node.views() if not any(view is each for each in node.writes))


def _holds(box: Box, other: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(box, other, strict=True))


def _meets(box: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True))
