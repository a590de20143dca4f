"""What a pattern costs in quality: `dap quality --suite cpu`, or `python -m dilated_attention_pytorch.tools.quality`.

The suites cpu and ci train retrieval tasks in minutes on a CPU, with rows for the limits of a
learned choice: the nearest and random blocks, an untrained scorer and an oracle. The suite rules
compares published rules that choose blocks. The suites small and gpu compare patterns, with
speed-ups:

- recall: every block of a sequence holds a key and its value and asks for a key told anywhere
  before it;
- editions (with `--plays` or `--fetch`): a byte-level language model reads passages of a play
  in a modern edition, then in that of 1623, whose bytes cost little to those who can look back
  to the same lines.

Quality retained is 0 for attention to the nearest tokens alone and 1 for dense attention. It is
set against the speed-up of attention, forward and backward, over torch's dense attention, taken
in turns in the same process on random tensors after the training. A row counts only if dense
attention learned the task: at least 95 % of the answers, or half a bit a byte less on the
second edition than on the first.

"Of dense's work" is the counted share of the pairs that causal dense attention computes, at the
length that is timed. The budget of adaptive attention in these two tasks is a number of blocks,
so early tokens see most of what lies before them: an eighth of the blocks is 23 % of the work,
a quarter 43 %. Earlier versions of this page gave 12.5 and 25 % for those rows, and equal
parameters for all. Editions are trained on shorter sequences for the first two fifths of the
steps. There, the budgets of adaptive, local, global + local and dilated attention cover
everything: those rows start with dense attention, and near, block dilated and random do not.
Adaptive attention has the parameters of its scorer besides, and scores pairs of tokens
(`score_unit=2`, no sink, no neighbours), a setting chosen for these tasks; the other patterns
have one geometry each. There is no row for an untrained scorer: most of the quality of the
adaptive rows may be its initialisation (see the retrieval suites). Recall is trained on shorter
sequences and smaller blocks than those it is timed on.
"""

TASKS = ("recall", "editions", "speed")
SUITE_NAMES = ("cpu", "ci", "tiny", "recipe", "rules", "rules-tiny", "small", "gpu", "rehearsal")
