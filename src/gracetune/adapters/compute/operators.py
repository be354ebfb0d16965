"""Register functions as operators, so that compiled graphs call them unchanged.

`torch.library.custom_op` does that too, but runs more Python code in each call: it compares the
outputs with the inputs, and prepares a backward that these operators do not have. A block calls a
dozen of them in each pass, and small batches are bound by the CPU, so each call counts. For the
same reason calls skip torch's dispatcher, which takes longer than most kernels run, unless
something observes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NAMESPACE = "gracetune"
"""Namespace of the operators in `torch.ops`. The planner counts all of them as matmuls."""
OPERATORS: dict[str, Operator[..., Any]] = {}
"""Full name, such as `gracetune::lora_linear` -> operator."""
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator(Generic[Arguments, Result]):
    """A function that is also registered as an operator under its name. Use it as a decorator.

    The function must not modify its arguments or return views of them. It has no gradient: call it
    in an autograd function, where none is recorded.
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        name = function.__name__
        _LIBRARY.define(
            name + torch.library.infer_schema(function, mutates_args=()),
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.function = function
        self.name = f"{NAMESPACE}::{name}"
        self.__doc__ = function.__doc__
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        # Compiled graphs call the overload, which calls this attribute.
        self.overload._op = _undispatched(function, self.overload._op)
        OPERATORS[self.name] = self

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the function, through torch's dispatcher only if something observes the call.

        The compiler does, and dispatch modes such as tracing and selective checkpointing do.
        """
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            result: Result = self.overload(*args, **kwargs)
            return result
        return self.function(*args, **kwargs)

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register the function that returns empty outputs, for tracing without data."""
        torch.library.register_fake(self.name, fake, lib=_LIBRARY)


def _undispatched(
    function: Callable[..., Any], dispatched: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `dispatched` while a dispatch mode is active, else `function`.

    The dispatcher would convert all arguments and results twice, and then call the same function.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return dispatched(*args, **kwargs)
        return function(*args, **kwargs)

    return call
