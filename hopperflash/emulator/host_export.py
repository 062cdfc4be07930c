"""Exports the host code of a compiled function as a `HostObject`: the only part that needs the
compiler."""

import importlib
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

from .errors import EmulationError
from .host import host_symbols, visible_signature
from .host_object import HostObject

_FUNCTION = "kernel"
_RUNTIME_PREFIXES = ("_cu", "cuda_", "CuteDSLRT_")
_FUNCTION_TYPE = re.compile(r"!llvm\.func<(?P<result>\w+) \((?P<parameters>[\w, ]*)\)>")
# What every CPU of the architecture has: a machine without a GPU compiles for others.
_BASELINE = {
    "x86_64": ("x86-64", '["+sse2"]'),
    "aarch64": ("generic", '["+neon"]'),
}


def export_host(compiled: Any) -> HostObject:
    """The host code of a `cute.compile` result made with `--enable-tvm-ffi`.

    Raises `EmulationError` for host code that cannot be told apart from what the compiler's Python
    objects add to it.
    """
    symbols = host_symbols(compiled.ir_module)
    if f"__tvm_ffi_{compiled.function_name}" not in symbols.defined:
        raise EmulationError("only functions compiled with --enable-tvm-ffi can be exported")
    if compiled.execution_args.has_pointer_address_arg_specs:
        raise EmulationError("functions that take raw pointers cannot be exported")
    _for_any_cpu(compiled.ir_module)
    with tempfile.TemporaryDirectory(prefix="hopperflash-") as folder:
        path = Path(folder, "host.o")
        compiled.export_to_c(str(path), function_name=_FUNCTION)
        code = path.read_bytes()
    types = {name: kind for name, kind in _declared_types(compiled.ir_module) if _is_runtime(name)}
    return HostObject(
        function=_FUNCTION,
        parameters=tuple(visible_signature(compiled, symbols).parameters),
        code=code,
        trampolines=_trampolines(types),
        symbols=tuple(types),
    )


def _mlir(name: str) -> Any:
    """A module of the compiler's MLIR, whose stubs leave most of it out."""
    return importlib.import_module(f"cutlass._mlir.{name}")


def _is_runtime(name: str) -> bool:
    return name.startswith(_RUNTIME_PREFIXES)


def _functions(module: Any) -> list[Any]:
    return [item.operation for item in module.body.operations if item.operation.name == "llvm.func"]


def _declared_types(module: Any) -> list[tuple[str, str]]:
    with module.context:
        return [
            (function.attributes["sym_name"].value, str(function.attributes["function_type"]))
            for function in _functions(module)
            if not function.regions[0].blocks
        ]


def _for_any_cpu(module: Any) -> None:
    """Has code generated for the least CPU of the architecture, not for the one at hand."""
    ir = _mlir("ir")
    baseline = _BASELINE.get(platform.machine())
    if baseline is None:
        return
    with module.context:
        cpu = ir.StringAttr.get(baseline[0])
        features = ir.Attribute.parse(f"#llvm.target_features<{baseline[1]}>")
        for function in _functions(module):
            if len(function.regions[0].blocks):
                function.attributes["target_cpu"] = cpu
                function.attributes["target_features"] = features


def _trampolines(types: dict[str, str]) -> bytes:
    """An object with a function of each name and type that jumps to what `bind` was given."""
    ir, aot = _mlir("ir"), _mlir("_mlir_libs._cutlass_ir")._aot_support
    jumps = [_jump(index, name, kind) for index, (name, kind) in enumerate(types.items())]
    array = f"!llvm.array<{len(types)} x ptr>"
    text = f"""module {{
        llvm.mlir.global internal @table() : {array} {{
            %zero = llvm.mlir.zero : {array}
            llvm.return %zero : {array}
        }}
        {"".join(jumps)}
        {_bind(len(types))}
    }}"""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        _for_any_cpu(module)
        exported: bytes = aot.export_module_to_bytes(module, format="o", opt_level=2)
    return exported


def _jump(index: int, name: str, kind: str) -> str:
    match = _FUNCTION_TYPE.fullmatch(kind)
    if match is None:
        raise EmulationError(f"host code declares {name} as {kind}, which cannot be passed on")
    types = [_mlir_type(part) for part in match["parameters"].split(", ") if part]
    named = ", ".join(f"%a{i}: {part}" for i, part in enumerate(types))
    values = ", ".join(f"%a{i}" for i in range(len(types)))
    call = f"llvm.call %target({values}) : !llvm.ptr, ({', '.join(types)}) ->"
    if match["result"] == "void":
        result, body = "", f"{call} ()\n llvm.return"
    else:
        kind = _mlir_type(match["result"])
        result, body = f"-> {kind}", f"%result = {call} {kind}\n llvm.return %result : {kind}"
    return f"""llvm.func @{name}({named}) {result} {{
        %table = llvm.mlir.addressof @table : !llvm.ptr
        %slot = llvm.getelementptr %table[{index}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        %target = llvm.load %slot : !llvm.ptr -> !llvm.ptr
        {body}
    }}
    """


def _bind(count: int) -> str:
    """A TVM-FFI function that stores its arguments; the value of one follows 8 bytes of type."""
    stores = [
        f"""%from{i} = llvm.getelementptr %arguments[{2 * i + 1}] : (!llvm.ptr) -> !llvm.ptr, i64
        %value{i} = llvm.load %from{i} : !llvm.ptr -> !llvm.ptr
        %to{i} = llvm.getelementptr %table[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
        llvm.store %value{i}, %to{i} : !llvm.ptr, !llvm.ptr
        """
        for i in range(count)
    ]
    parameters = "%handle: !llvm.ptr, %arguments: !llvm.ptr, %count: i32, %result: !llvm.ptr"
    return f"""llvm.func @__tvm_ffi_bind({parameters}) -> i32 {{
        %table = llvm.mlir.addressof @table : !llvm.ptr
        %success = llvm.mlir.constant(0 : i32) : i32
        {"".join(stores)}
        llvm.return %success : i32
    }}"""


def _mlir_type(name: str) -> str:
    return "!llvm.ptr" if name == "ptr" else name
