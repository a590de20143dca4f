"""Triton's interpreter without repeated work, for processes that interpret to their end."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import triton.language as tl
from conftest import ALLOCATORS, poisoned
from kernels.memory_check import check_memory
from triton.runtime import interpreter

PLAIN = (tl.int32, tl.int64, tl.float32, tl.float64)
"""Types in which an operation on two operands of the type is computed"""
PATCHED = SimpleNamespace(restore=lambda: None)
"""Stands for the scope that would undo the replacements in `triton.language`."""


def start_interpreting() -> None:
    """Check memory, poison allocations of the library and leave out repeated work, in a process of its own."""
    skip_repeated_work()
    check_memory()
    for owner, name in ALLOCATORS:
        setattr(owner, name, poisoned(getattr(owner, name)))


def skip_repeated_work() -> None:
    """Shorten interpretation; results are unchanged.

    Each call of a device function searches `triton.language` for functions to replace, each operation builds a table of
    types, the types of its operands and their shapes, and each integer operation is repeated in 64 bits for an
    assertion that is off unless debugging. A Triton release without one of these parts runs as it is.
    """
    for name, wrap in (("_patch_lang", patch_once), ("_get_np_dtype", types_once), ("_patch_attr", call_directly)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, wrap(getattr(interpreter, name)))
    keep_block_types()
    keep_tensor_shapes()
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = broadcast_unequal(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = check_unequal(semantic.binary_op_type_checking_impl)
    if not interpreter.interpreter_builder.options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def patch_once(patch: Any) -> Any:
    """`_patch_lang` that searches once for each set of language modules that a function refers to."""
    done: set[tuple[bool, ...]] = set()
    seen: set[FunctionType] = set()

    def patched(fn: FunctionType) -> SimpleNamespace:
        if fn in seen:
            return PATCHED
        seen.add(fn)
        values = fn.__globals__.values()
        visible = tuple(any(value is module for value in values) for module in (tl, tl.core))
        if visible not in done:
            patch(fn)
            done.add(visible)
        return PATCHED

    return patched


def call_directly(patch: Any) -> Any:
    """`_patch_attr` without the check of `builtin` for an argument that the interpreter has just added."""
    checked = tl.core.builtin(lambda: None).__code__

    def patch_member(obj: Any, name: str, member: Any, *rest: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member
        patch(obj, name, inner, *rest)

    return patch_member


def types_once(find: Any) -> Any:
    """`_get_np_dtype` with a cache by scalar type."""
    cached: dict[str, Any] = {}

    def cached_type(ty: Any) -> Any:
        name = (ty.element_ty if ty.is_block() else ty).name
        if name not in cached:
            cached[name] = find(ty)
        return cached[name]

    return cached_type


def keep_block_types() -> None:
    """Make `block_type` return one object per element type and shape; types are never modified."""
    kind, initialize = tl.block_type, tl.block_type.__init__
    made: dict[tuple[Any, ...], Any] = {}

    def new(cls: type, *given: Any, **named: Any) -> Any:
        if cls is not kind or len(given) != 2:
            return object.__new__(cls)
        element, shape = given
        # Pointer types have no hash. The type below keeps its element type, so that the number stays its own.
        key = (id(element), *[getattr(side, "value", side) for side in shape])
        found = made.get(key)
        if found is None:
            found = object.__new__(cls)
            initialize(found, element, shape)
            made[key] = found
        return found

    def initialize_once(self: Any, *given: Any, **named: Any) -> None:
        if "shape" not in self.__dict__:
            initialize(self, *given, **named)

    kind.__new__, kind.__init__ = new, initialize_once


def keep_tensor_shapes() -> None:
    """Make `tensor` read the constants of its shape from its type, where the first tensor of the type left them."""
    initialize = tl.tensor.__init__

    def initialize_from_type(self: Any, handle: Any, type: Any) -> None:
        shape = type.__dict__.get("shape_of_tensors")
        if shape is None:
            initialize(self, handle, type)
            type.shape_of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = shape

    tl.tensor.__init__ = initialize_from_type


def broadcast_unequal(broadcast: Any) -> Any:
    """`broadcast_impl_value` that returns operands of one shape as they are."""

    def broadcast_operands(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one is other or (one.is_block() and other.is_block() and [*one.shape] == [*other.shape]):
            return left, right
        return broadcast(self, left, right)

    return broadcast_operands


def check_unequal(check: Any) -> Any:
    """`binary_op_type_checking_impl` without repeated work for operands of one plain type.

    Operands of one type are returned as they are, a scalar is copied into the shape of its block, and a number becomes
    an operand once per type. The interpreter writes into no operand.
    """
    numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def check_operands(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        one, other = getattr(left, "type", None), getattr(right, "type", None)
        if one is None or other is None:
            return meet_number(self, left, right, options, named)
        if left.dtype is right.dtype and any(left.dtype is plain for plain in PLAIN):
            if one is other:
                return left, right
            if one is left.dtype:
                return splat(self, left, other), right
            if other is right.dtype:
                return left, splat(self, right, one)
        return check(self, left, right, *options, **named)

    def splat(self: Any, scalar: Any, kind: Any) -> Any:
        return tl.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def meet_number(self: Any, left: Any, right: Any, options: Any, named: dict[str, Any]) -> Any:
        tensor, number = (left, right) if isinstance(left, tl.tensor) else (right, left)
        if type(number) not in (int, float) or not any(getattr(tensor, "dtype", None) is plain for plain in PLAIN):
            return check(self, left, right, *options, **named)
        # Zero has a sign, and 1 equals 1.0.
        key = id(tensor.type), tensor is left, type(number), repr(number), options, *named.items()
        if key in numbers:
            _, operand = numbers[key]
            return (left, operand) if tensor is left else (operand, right)
        results = check(self, left, right, *options, **named)
        same, operand = results if tensor is left else results[::-1]
        if same is tensor:
            # The type stays alive, so that its number stays its own.
            numbers[key] = tensor.type, operand
        return results

    return check_operands
