// Best blocks of rows by their scores, without sorting.

#pragma once

#include "native_lanes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

// native.py declares the same structure with the same order of fields.
extern "C" {

// indices[s][row] = the wanted[s][row] blocks with the largest scores, ascending, then `blocks`; of equal scores the
// first. A block competes if it is visible, at least `local` away from the row's own block, not one of the first
// `sink`, before the row's own block if `causal`, and its score is neither NaN nor -inf. Every array is dense.
struct Choice {
  Index streams, rows, width, blocks, room, local, sink, causal, threads;
  const float* scores;          // (streams, rows, width): of the first `width` blocks
  const std::int64_t* own;      // (rows): block of each row
  const std::int64_t* wanted;   // (streams, rows)
  const std::uint8_t* visible;  // (streams, blocks)
  std::int32_t* indices;        // (streams, rows, room)
  std::int32_t* counts;         // (streams, rows): blocks chosen
};

}  // extern "C"

namespace {

constexpr std::int32_t kNoBlock = std::numeric_limits<std::int32_t>::min();

// Integer in the order of the scores: equal for both zeros, `kNoBlock` for NaN and -inf.
inline std::int32_t order_of(float score) {
  const float x = score + 0.0f;
  std::int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits ^= (bits >> 31) & 0x7fffffff;
  return x > -kInfinity<float> ? bits : kNoBlock;
}

inline Index count_from(const std::int32_t* keys, Index width, std::int32_t least) {
  std::int32_t count = 0;
  for (Index j = 0; j < width; ++j) count += keys[j] >= least;
  return count;
}

// Chooses blocks of a row into `to`, which has room for a block of every key; returns their number.
inline Index choose_row(const std::int32_t* keys, Index width, Index wanted, std::int32_t* to) {
  std::int32_t most = kNoBlock;
  for (Index j = 0; j < width; ++j) most = std::max(most, keys[j]);
  if (wanted <= 0 || most == kNoBlock) return 0;
  // Largest `low` with at least `wanted` keys >= low; if fewer compete, all of them are chosen.
  Index low = Index(kNoBlock) + 1, high = most, above = count_from(keys, width, std::int32_t(low));
  while (above > wanted && low < high) {
    const Index middle = low + (high - low + 1) / 2;
    const Index count = count_from(keys, width, std::int32_t(middle));
    if (count >= wanted)
      low = middle, above = count;
    else
      high = middle - 1;
  }
  // Ties: the first of the keys equal to `low`.
  const std::int32_t least = std::int32_t(low);
  Index surplus = std::max<Index>(above - wanted, 0), many = 0;
  for (Index j = 0; j < width; ++j) {
    to[many] = std::int32_t(j);
    many += keys[j] >= least;
  }
  for (Index i = many; surplus > 0 && i-- > 0;)
    if (keys[to[i]] == least) {
      std::copy(to + i + 1, to + many, to + i);
      --many, --surplus;
    }
  return many;
}

inline void choose_blocks_of_rows(const Choice& c) {
#pragma omp parallel num_threads(int(c.threads))
  {
    std::vector<std::int32_t> keys(c.width), chosen(c.width + 1);
#pragma omp for schedule(dynamic, 64)
    for (Index item = 0; item < c.streams * c.rows; ++item) {
      const Index stream = item / c.rows, own = c.own[item % c.rows];
      const float* scores = c.scores + item * c.width;
      const std::uint8_t* visible = c.visible + stream * c.blocks;
      const Index width = c.causal ? std::min(own, c.width) : c.width;
      for (Index j = 0; j < width; ++j) keys[j] = visible[j] ? order_of(scores[j]) : kNoBlock;
      std::fill_n(keys.data(), std::min(c.sink, width), kNoBlock);
      const Index first = std::clamp<Index>(own - c.local + 1, 0, width);
      std::fill(keys.data() + first, keys.data() + std::clamp<Index>(own + c.local, first, width), kNoBlock);
      const Index wanted = std::min<Index>(c.wanted[item], c.room);
      const Index many = choose_row(keys.data(), width, wanted, chosen.data());
      std::int32_t* to = c.indices + item * c.room;
      std::fill(std::copy_n(chosen.data(), many, to), to + c.room, std::int32_t(c.blocks));
      c.counts[item] = std::int32_t(many);
    }
  }
}

}  // namespace
