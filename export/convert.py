"""`qad convert`: from one layout to the other, file by file, without quantizing anything again.

Codes and block scales are copied byte for byte, global and input scales become their reciprocals (export/layouts/layout.py says
what that costs: one ulp, once), KV scales and metadata change names, everything else goes along as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from export.card import relabel
from export.card_sections import serve_section
from export.check import require_sound
from export.files.safetensors_writer import write_file
from export.files.whole_files import WholeFiles, byte_progress
from export.folder import Folder, open_folder
from export.layouts.config_files import CONFIG, INDEX, NESTED, write_config_files, write_index
from export.layouts.layout import KV_LEAVES, LAYOUTS, Layout, require_kv_form
from export.layouts.scheme import Scheme
from export.rules.metadata import checked
from export.writer import KIND, require_room
from qad.arms.kv_cache import CAST
from qad.arms.origin import origin_of
from qad.artifact import MANIFEST, Artifact, digest_of, run_stage, sha256_file
from qad.errors import UsageError
from qad.model.beside import beside
from qad.model.families import DEFAULT
from qad.place import require_apart
from qad.untrusted.safetensors_header import Entry

REWRITTEN = (CONFIG, NESTED, INDEX, MANIFEST)


def convert(folder: Path, layout: str, out: Path) -> Artifact:
    """Write `folder` to `out` in another layout; a finished conversion of the same folder is reused, an interrupted one goes on
    behind its last whole file.

    Peak memory is one tensor. Raises UsageError for an unknown layout, a folder that has it already, is not quantized, has
    another format than those of qad.numerics.formats, asks for more than is computed here, or whose KV cache the layout has
    no words for; BrokenCheckpointError
    for one that `qad check` refuses, a half converted one among them; StorageError when writing fails.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}")
    opened, target = open_folder(folder), LAYOUTS[layout]
    require_apart(out, {"checkpoint": folder})
    scheme = require_convertible(opened, target)
    config = {"layout": layout, "converted_from": opened.layout.name}
    if opened.casts_kv_cache:
        config["kv_cache"] = CAST

    def work(partial: Path) -> dict[str, str]:
        files, total = WholeFiles(partial, opened.files), sum(entry.bytes for _, entry in opened.tensors.values())
        require_room(partial, total - files.bytes)
        with byte_progress("convert", total, files) as bar:
            for file in opened.files:
                files.write(file, lambda path, file=file: _convert_file(opened, target, file, path, bar.update))  # type: ignore[misc]
        if opened.index is not None:
            weight_map = {renamed(opened, target, name): file for name, (file, _) in opened.tensors.items()}
            write_index(partial, weight_map, total)
        write_config_files(partial, opened.config, target, scheme)
        beside(folder, REWRITTEN).copy(partial)
        card = partial / "README.md"
        if card.is_file():
            serve = serve_section(target, {*scheme.layers.values()}, opened.config, scheme.kv_cache)
            card.write_text(relabel(card.read_text(encoding="utf-8"), opened.layout, target, serve), encoding="utf-8")
        return files.finish()

    inputs = {"checkpoint": folder_digest(folder)}
    return run_stage(KIND, out, config, inputs, work, resumable=True, origin=origin_of(folder))


def require_convertible(folder: Folder, target: Layout) -> Scheme:
    """The scheme to write. Raises as `convert` does."""
    if folder.algorithm is not None and folder.algorithm not in checked():
        raise UsageError(f"{folder.path} is {folder.algorithm}: only {', '.join(checked())} can be converted")
    require_sound(folder.path)
    require_computed(folder, "converted")
    if folder.layout is target:
        raise UsageError(f"{folder.path} is in the {target.name} layout already: there is nothing to convert")
    require_kv_form(folder.announced.kv_cache, target, str(folder.path))
    assert folder.algorithm is not None
    layers = {module: folder.format_of(module) for module in in_model_order(folder)}
    return Scheme(folder.algorithm, excluded_names(folder), folder.announced.kv_cache, layers)


def require_computed(folder: Folder, what: str) -> None:
    """Raises UsageError where metadata written anew would no longer ask for what the folder's own ask for."""
    unknown = ", ".join(folder.announced.not_computed[:4])
    if unknown:
        raise UsageError(
            f"{folder.path} asks for {unknown}, which is unknown here and would be lost: it cannot be "
            f"{what}; serve it as it is, or make it again with the tool that wrote it"
        )


def in_model_order(folder: Folder) -> list[str]:
    """Quantized modules in the order of the architecture, those it does not know in the files' order behind them."""
    known = folder.skeleton.linears if folder.skeleton else {}
    return [*(module for module in known if module in folder.packed), *(m for m in folder.packed if m not in known)]


def excluded_names(folder: Folder) -> tuple[str, ...]:
    """Full names of the Linears, routers and embeddings that stay unquantized, sorted, from the files themselves: globs
    and `re:` patterns of one layout mean nothing in the other."""
    listed = {name for name in folder.announced.excluded if f"{name}.weight" in folder.tensors and name not in folder.packed}
    drafts = {name for _, name in folder.draft_modules}
    names = {*folder.linears, *folder.embeddings, *folder.unbuilt, *listed, *drafts}
    return tuple(sorted(names | ({DEFAULT.head} if folder.head in names else set())))


def renamed(folder: Folder, target: Layout, name: str) -> str:
    """The name of a tensor of `folder` in another layout."""
    module, _, leaf = name.rpartition(".")
    if module in folder.packed and leaf in folder.leaves_of(module):
        return f"{module}.{target.leaves_of(folder.format_of(module))[folder.leaves_of(module).index(leaf)]}"
    if leaf in KV_LEAVES:
        attention = module.removesuffix(f".{leaf[0]}_proj")
        if name == folder.layout.kv_scale(attention, leaf[0]):
            return target.kv_scale(attention, leaf[0])
    return name


def folder_digest(folder: Path) -> str:
    """Identity by content, whatever a manifest says: the folder may have been changed since."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return digest_of({path.relative_to(folder).as_posix(): sha256_file(path) for path in files})


def _convert_file(folder: Folder, target: Layout, file: str, path: Path, progress: Callable[[int], object]) -> str:
    """Returns the sha256 of what it wrote."""
    names = [name for name, (where, _) in folder.tensors.items() if where == file]
    entries = []
    for name in names:
        entry = folder.tensors[name][1]
        shape = target.scalar if _is_scalar(folder, name) else entry.shape
        entries.append(Entry(renamed(folder, target, name), entry.dtype, shape))
    return write_file(path, entries, _tensors(folder, target, names), progress, folder.headers[file].metadata)


def _tensors(folder: Folder, target: Layout, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = folder.get(name)
        if name.endswith(KV_LEAVES):
            tensor = tensor.reshape(target.scalar)
        elif _is_scalar(folder, name):
            format = folder.format_of(name.rpartition(".")[0])
            tensor = target.store_scale(folder.layout.decode_scale(tensor, format), format)
        yield renamed(folder, target, name), tensor


def _is_scalar(folder: Folder, name: str) -> bool:
    """Global and input scales and KV scales, whose shapes differ between layouts."""
    module, _, leaf = name.rpartition(".")
    scalar = module in folder.packed and leaf in folder.layout.scalars_of(folder.format_of(module))
    return scalar or leaf in KV_LEAVES
