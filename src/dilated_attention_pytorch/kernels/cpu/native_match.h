// Best matches of rows with blocks of keys, without an array of all pairs.

#pragma once

#include "native_lanes.h"

#include <algorithm>
#include <vector>

// native.py declares the same structure with the same order of fields.
extern "C" {

// best[s][row][block] = max of <queries[s][row], keys[s][block][u]> over the sub-blocks u of the block that are there.
// Queries and best matches are dense arrays; keys are dense within a stream. A block without a sub-block gives -inf; a
// product that is NaN makes the maximum NaN.
struct Match {
  Index streams, rows, blocks, units, rank, threads;
  Index key_stream, there_stream;  // elements from the keys of one stream to those of the next, and of `there`
  const void *queries, *keys;  // (streams, rows, rank), (streams, blocks, units, rank)
  const std::uint8_t* there;   // (streams, blocks, units), or null where every sub-block is there
  void* best;                  // (streams, rows, blocks)
};

}  // extern "C"

namespace {

constexpr Index kMatchBlocks = 64;  // blocks between two transposes of the result

template <typename T>
struct MatchWorkspace {
  static constexpr Index lanes = kPanel * Lanes<T>::count;
  std::vector<T> owned, best_t, ones;
  T* query_t;  // on a cache line: a register that spans two of them takes two loads

  explicit MatchWorkspace(Index rank)
      : owned(rank * lanes + kBytes / sizeof(T)),
        best_t(kMatchBlocks * lanes),
        ones(lanes, T(1)),
        query_t(reinterpret_cast<T*>(round_up(reinterpret_cast<std::intptr_t>(owned.data()), kBytes))) {}
};

// Largest products so far of P vectors of rows. A comparison with NaN is false, so NaN would be lost at the next
// product: `nan` keeps it.
template <typename T, int P>
struct BestMatch {
  Vector<T> top[P], nan[P];
};

// Adds the products of R keys, which never leave the registers. Not inlined: all registers are taken within the sum.
template <typename T, int R, int P>
__attribute__((noinline)) void match_keys(const T* keys, Index rank, const T* query_t, BestMatch<T, P>& best) {
  constexpr Index lanes = MatchWorkspace<T>::lanes, n = Lanes<T>::count;
  Vector<T> sum[R][P] = {};
  for (Index k = 0; k < rank; ++k, query_t += lanes) {
    Vector<T> operand[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) operand[p] = load(query_t + p * n);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const T x = keys[r * rank + k];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[r][p] += operand[p] * x;
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      best.top[p] = maximum<T>(best.top[p], sum[r][p]);
      best.nan[p] = sum[r][p] == sum[r][p] ? best.nan[p] : sum[r][p];
    }
}

// Best match of P vectors of rows, of a tile of transposed rows, with one block, into `to`.
template <typename T, int P>
void match_block(const Match& m, const T* query_t, const T* keys, const std::uint8_t* there, T* to) {
  BestMatch<T, P> best{};
  for (Vector<T>& one : best.top) one = Vector<T>{} - kInfinity<T>;
  for (Index u = 0; u < m.units;) {
    Index end = there ? u : m.units;
    while (end < m.units && there[end]) ++end;
    for (; u + kRows <= end; u += kRows) match_keys<T, kRows, P>(keys + u * m.rank, m.rank, query_t, best);
    for (; u + 2 <= end; u += 2) match_keys<T, 2, P>(keys + u * m.rank, m.rank, query_t, best);
    if (u < end) match_keys<T, 1, P>(keys + u * m.rank, m.rank, query_t, best);
    for (u = end; there && u < m.units && !there[u];) ++u;
  }
  for (int p = 0; p < P; ++p) {
    const Vector<T> nan = best.nan[p];
    store(to + p * Lanes<T>::count, nan == nan ? best.top[p] : nan);
  }
}

template <typename T>
void best_match(const Match& m) {
  constexpr Index lanes = MatchWorkspace<T>::lanes;
  const Index tiles = (m.rows + lanes - 1) / lanes;
#pragma omp parallel num_threads(int(m.threads))
  {
    MatchWorkspace<T> w(m.rank);
#pragma omp for schedule(dynamic)
    for (Index item = 0; item < m.streams * tiles; ++item) {
      const Index stream = item / tiles, first = item % tiles * lanes, count = std::min(lanes, m.rows - first);
      const T* queries = static_cast<const T*>(m.queries) + (stream * m.rows + first) * m.rank;
      const T* keys = static_cast<const T*>(m.keys) + stream * m.key_stream;
      T* best = static_cast<T*>(m.best) + (stream * m.rows + first) * m.blocks;
      std::fill_n(w.query_t, m.rank * lanes, T(0));
      transpose_in<T>([&](Index i) { return queries + i * m.rank; }, count, m.rank, T(1), w.query_t, lanes);
      for (Index block = 0; block < m.blocks; block += kMatchBlocks) {
        const Index many = std::min(kMatchBlocks, m.blocks - block);
        for (Index b = 0; b < many; ++b) {
          const Index unit = (block + b) * m.units;
          const std::uint8_t* there = m.there ? m.there + stream * m.there_stream + unit : nullptr;
          for_strips<T>(round_up(count, Lanes<T>::count), [&](auto vectors, Index x) {
            constexpr int P = decltype(vectors)::value;
            match_block<T, P>(m, w.query_t + x, keys + unit * m.rank, there, w.best_t.data() + b * lanes + x);
          });
        }
        const auto row = [&](Index i) { return best + i * m.blocks + block; };
        transpose_out(w.best_t.data(), lanes, count, many, row, w.ones.data(), false);
      }
    }
  }
}

}  // namespace
