"""Bytes that the tensor operations of a call read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the sizes of each operation's tensors; an operation that makes a view moves none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: int = 0

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401
        types: Iterable[type],
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = function(*arguments, **(named or {}))
        read = list(_tensors((arguments, named or {})))
        written = list(_tensors(result))
        places = {tensor.untyped_storage().data_ptr() for tensor in read}
        shared = any(tensor.untyped_storage().data_ptr() in places for tensor in written)
        if function._schema.is_mutable or not shared:  # else a view
            self.moved += sum(_bytes(tensor) for tensor in (*read, *written))
        return result


def moved_bytes(function: Callable[[], object]) -> int:
    """Bytes of one call, its backward passes included, as if nothing stayed in a cache."""
    with _Counter() as counter:
        function()
    return int(counter.moved)


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor is as large as what is behind it."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _tensors(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
