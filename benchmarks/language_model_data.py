"""Data of the language model: tokens of C sources, needles, and tokens whose 8-gram stood far back."""

from __future__ import annotations

import argparse
import json
import lzma
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TRAINED = (
    *("kernel", "fs", "net", "block", "lib", "crypto", "security", "sound/core", "sound/pci", "drivers/usb"),
    *("drivers/ata", "drivers/block", "drivers/char", "drivers/hid", "drivers/i2c", "drivers/infiniband"),
    *("drivers/input", "drivers/mmc", "drivers/mtd", "drivers/pci", "drivers/tty"),
)
HELD_OUT = ("mm", "fs/btrfs", "drivers/md", "net/sctp", "drivers/crypto")
"""Subsystems of the kernel; a file belongs to the longest prefix of its path."""
GRAM = 8
DATA_BYTES = 48 << 20
"""Limit of the files: a machine without network gets them with the repository."""
NEEDLES = 512


def package_files(package: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """C sources of a Debian kernel source package, which apt downloads into the folder."""
    if not (found := sorted(folder.glob(f"{package}_*.deb"))):
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        found = sorted(folder.glob(f"{package}_*.deb"))
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", found[-1]], stdout=subprocess.PIPE) as unpack,
        tarfile.open(fileobj=unpack.stdout, mode="r|") as package_tar,
    ):
        archive = next(package_tar.extractfile(x) for x in package_tar if x.name.endswith(".tar.xz"))
        with tarfile.open(fileobj=archive, mode="r|xz") as tar:
            for file in tar:
                if file.isfile() and file.name.endswith((".c", ".h")) and (content := tar.extractfile(file)):
                    yield file.name.partition("/")[2], content.read()
        unpack.kill()


def folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """C sources below a folder."""
    for path in folder.rglob("*.[ch]"):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def is_below(path: str, folders: Iterable[str]) -> int:
    """Length of the longest of the folders that holds the path."""
    return max((len(x) for x in folders if path.startswith(x + "/")), default=0)


def prepare(given: argparse.Namespace, vocabulary_size: int) -> None:
    """Write train.xz and held_out.xz (uint16 tokens) and vocabulary.json."""
    given.folder.mkdir(parents=True, exist_ok=True)
    files = folder_files(given.sources) if given.sources else package_files(given.package, given.folder)
    parts: dict[str, list[tuple[str, bytes]]] = {"train": [], "held_out": []}
    for path, text in files:
        held, trained = is_below(path, given.held_out), is_below(path, given.trained)
        if held or trained:
            parts["held_out" if held > trained else "train"].append((path, text))
    encode: Callable[[list[str]], list[list[int]]]
    vocabulary: dict[str, Any] = {"size": vocabulary_size, "held_out": given.held_out, "trained": given.trained}
    texts = {name: [x.decode("utf-8", "replace") for _, x in sorted(part)] for name, part in parts.items()}
    if not all(texts.values()):
        sys.exit(f"expected files in trained and held-out folders, got { ({k: len(v) for k, v in texts.items()}) }")
    if vocabulary_size == 256:
        encode = lambda many: [list(x.encode()) for x in many]  # noqa: E731
    else:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        sample = random.Random(0).sample(texts["train"], min(len(texts["train"]), 2000))
        bpe.train_from_iterator(sample, trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=alphabet))
        encode = lambda many: [x.ids for x in bpe.encode_batch(many, add_special_tokens=False)]  # noqa: E731
        vocabulary["bpe"] = json.loads(bpe.to_str())
    # Answers begin with the space of their number, so that questions are the same tokens in both places.
    draw = random.Random(1)
    names = [f"{draw.choice('QXZJ')}{''.join(draw.choices('ABDEGIKLMNOPRSTU', k=6))}" for _ in range(NEEDLES)]
    asked, answers = [f"\n#define {x}" for x in names], [f" {draw.randrange(1000, 10000)}" for _ in names]
    vocabulary["needles"] = list(zip(encode(asked), encode(answers), strict=True))
    for name, part in texts.items():
        pieces = (np.array(x, np.uint16) for at in range(0, len(part), 256) for x in encode(part[at : at + 256]))
        tokens = np.concatenate(list(pieces))
        (given.folder / f"{name}.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=2))
        vocabulary[f"{name}_tokens"] = len(tokens)
        vocabulary[f"{name}_bytes"] = sum(len(x.encode()) for x in part)
    (given.folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    written = sum(path.stat().st_size for path in given.folder.iterdir() if path.suffix in (".xz", ".json"))
    print({k: v for k, v in vocabulary.items() if k not in ("bpe", "needles")}, f"{written / 2**20:.1f} MiB")
    if written > DATA_BYTES:
        sys.exit(
            f"expected at most {DATA_BYTES >> 20} MiB of tokens, got {written >> 20}; pass fewer --trained folders"
        )


@cache
def tokens_of(path: Path) -> Tensor:
    """All tokens of a file, int32."""
    return torch.from_numpy(np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16).astype(np.int32))


def drawn(tokens: Tensor, n: int, batch: int, seed: int, device: str) -> Tensor:
    """`batch` sequences of n tokens and the next one, from places that depend on the seed alone."""
    starts = torch.randint(len(tokens) - n, (batch,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([tokens[at : at + n + 1] for at in starts.tolist()]).long().to(device)


def far_tokens(tokens: np.ndarray, far: int) -> np.ndarray:
    """Bool (n): the 8-gram that ends at a token stood before in the sequence, last more than `far` tokens back."""
    grams = np.lib.stride_tricks.sliding_window_view(tokens, GRAM)
    _, name = np.unique(grams, axis=0, return_inverse=True)
    order = np.argsort(name.ravel(), kind="stable")
    same = name.ravel()[order][1:] == name.ravel()[order][:-1]
    result = np.zeros(len(tokens), bool)
    result[order[1:][same & (np.diff(order) > far)] + GRAM - 1] = True
    return result


def with_needles(tokens: Tensor, needles: list[Any], count: int, draw: random.Random) -> tuple[Tensor, list[Tensor]]:
    """Sequence with `count` definitions at random places of its first half, all asked at its end; answers' places."""
    tokens, n = tokens.clone(), tokens.shape[-1]
    chosen = draw.sample(needles, count)
    pieces = [torch.tensor(ask + answer, device=tokens.device) for ask, answer in chosen]
    slot = n // 2 // count
    for index, piece in enumerate(pieces):
        at = index * slot + draw.randrange(slot - len(piece))
        tokens[at : at + len(piece)] = piece
    draw.shuffle(order := list(range(count)))
    at, places = n - sum(map(len, pieces)), []
    for index in order:
        tokens[at : at + len(pieces[index])] = pieces[index]
        at += len(pieces[index])
        places.append(torch.arange(at - len(chosen[index][1]), at))
    return tokens, places
