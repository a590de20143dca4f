// Best matches of rows with blocks of keys, without an array of all pairs.

#pragma once

#include "native_lanes.h"

#include <algorithm>
#include <vector>

// native.py declares the same structure with the same order of fields.
extern "C" {

// best[s][row][block] = max of <queries[s][row], keys[s][block][u]> over the sub-blocks u of the block that are there.
// Every array is dense. A block without a sub-block gives -inf; a product that is NaN makes the maximum NaN.
struct Match {
  Index streams, rows, blocks, units, rank, threads;
  const void *queries, *keys;  // (streams, rows, rank), (streams, blocks, units, rank)
  const std::uint8_t* there;   // (streams, blocks, units), or null where every sub-block is there
  void* best;                  // (streams, rows, blocks)
};

}  // extern "C"

namespace {

constexpr Index kMatchKeys = 4 * kRows;  // keys whose products stay in the L1 cache until the maximum is taken
constexpr Index kMatchBlocks = 64;       // blocks between two transposes of the result

template <typename T>
struct MatchWorkspace {
  static constexpr Index lanes = kPanel * Lanes<T>::count;
  std::vector<T> query_t, products, best_t, ones;

  explicit MatchWorkspace(Index rank)
      : query_t(rank * lanes), products(kMatchKeys * lanes), best_t(kMatchBlocks * lanes), ones(lanes, T(1)) {}
};

// Best match of a tile of transposed rows with one block, into `best`.
template <typename T>
void match_block(const Match& m, MatchWorkspace<T>& w, const T* keys, const std::uint8_t* there, T* best) {
  constexpr Index lanes = MatchWorkspace<T>::lanes, n = Lanes<T>::count;
  // A comparison with NaN is false, so NaN would be lost at the next product.
  Vector<T> top[kPanel], nan[kPanel] = {};
  for (Vector<T>& one : top) one = Vector<T>{} - kInfinity<T>;
  for (Index u = 0; u < m.units; u += kMatchKeys) {
    const Index many = std::min(kMatchKeys, m.units - u);
    const Run<T> run{keys + u * m.rank, m.rank, 1};
    product(&run, 1, many, m.rank, w.query_t.data(), lanes, lanes, w.products.data(), lanes, false);
    for (Index j = 0; j < many; ++j) {
      if (there && !there[u + j]) continue;
      const T* row = w.products.data() + j * lanes;
      for (int p = 0; p < kPanel; ++p) {
        const Vector<T> x = load(row + p * n);
        top[p] = maximum<T>(top[p], x);
        nan[p] = x == x ? nan[p] : x;
      }
    }
  }
  for (int p = 0; p < kPanel; ++p) store(best + p * n, nan[p] == nan[p] ? top[p] : nan[p]);
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
      const T* keys = static_cast<const T*>(m.keys) + stream * m.blocks * m.units * m.rank;
      T* best = static_cast<T*>(m.best) + (stream * m.rows + first) * m.blocks;
      std::fill(w.query_t.begin(), w.query_t.end(), T(0));
      transpose_in<T>([&](Index i) { return queries + i * m.rank; }, count, m.rank, T(1), w.query_t.data(), lanes);
      for (Index block = 0; block < m.blocks; block += kMatchBlocks) {
        const Index many = std::min(kMatchBlocks, m.blocks - block);
        for (Index b = 0; b < many; ++b) {
          const Index unit = (block + b) * m.units;
          const std::uint8_t* there = m.there ? m.there + stream * m.blocks * m.units + unit : nullptr;
          match_block(m, w, keys + unit * m.rank, there, w.best_t.data() + b * lanes);
        }
        const auto row = [&](Index i) { return best + i * m.blocks + block; };
        transpose_out(w.best_t.data(), lanes, count, many, row, w.ones.data(), false);
      }
    }
  }
}

}  // namespace
