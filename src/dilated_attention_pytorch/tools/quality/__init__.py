"""Quality that sparse patterns retain: `dap quality`, or `python -m dilated_attention_pytorch.tools.quality`.

Three groups of suites measure how much of the quality of dense attention remains:

- The suites cpu and ci train retrieval tasks in minutes on a CPU, with controls for a learned
  choice: the nearest and random blocks, an untrained scorer and an oracle.
- The suite rules compares published rules that choose blocks.
- The suites small and gpu compare patterns and their speed-ups on two tasks, recall and editions.

Tasks of the suites small and gpu:

- recall: every block of a sequence contains a key with its value and a query for an earlier key;
- editions (with `--plays` or `--fetch`): a byte-level language model reads passages of a play
  in a modern edition, then in the edition of 1623. A model that attends to the same lines of the
  first edition predicts the second with few bits.

Quality retained is 0 for attention to the nearest tokens only and 1 for dense attention. The
speed-up is that of attention, forward and backward, over torch's dense attention, measured
alternately in one process on random tensors after the training. A row counts only if dense
attention learned the task: at least 95 % of the answers, or half a bit per byte less on the
second edition than on the first.

"Of dense's work" is the counted share of the pairs that causal dense attention computes, at the
timed length. Conditions of these two tasks:

- The budget of adaptive attention is a number of blocks, so early tokens attend to most of the
  tokens before them: an eighth of the blocks is 23 % of the work, a quarter 43 %.
- Editions is trained on shorter sequences for the first two fifths of the steps. At these lengths
  the budgets of adaptive, local, global + local and dilated attention cover everything, so these
  rows start with dense attention; near, block dilated and random do not.
- Adaptive attention has additional parameters, those of its scorer, and scores pairs of tokens
  (`score_unit=2`, no sink, no neighbours), a setting chosen for these tasks. The other patterns
  have one geometry each.
- There is no row for an untrained scorer: most of the quality of the adaptive rows may be due to
  the initialisation (see the retrieval suites).
- Recall is trained on shorter sequences and smaller blocks than those it is timed on.
"""

TASKS = ("recall", "editions", "speed")
SUITE_NAMES = ("cpu", "ci", "tiny", "rules", "rules-tiny", "small", "gpu", "rehearsal")
