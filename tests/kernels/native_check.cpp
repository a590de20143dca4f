// The C interface of the kernel without Python: causal attention of two tiles with a soft cap and a bias by distance,
// forward and backward, against loops.
// Usage: native_check LIBRARY. Runs under an emulator too, for a library of another machine.

#include "native_tiles.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <string>

constexpr Index N = 128, B = 64, H = 2, D = 24, E = 40, R = 9, P = 64;
constexpr double kCap = 1.5;

template <typename T>
double check(void* library, const char* type, double bound) {
  using Run = void (*)(const Call*);
  const auto forward = Run(dlsym(library, (std::string("forward_") + type).c_str()));
  const auto backward = Run(dlsym(library, (std::string("backward_") + type).c_str()));
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  const auto drawn = [&](Index width) {
    std::vector<T> values(H * N * width);
    for (T& value : values) value = T(normal(random));
    return values;
  };
  std::vector<T> q = drawn(D), k = drawn(D), v = drawn(E), grad = drawn(E);
  const Index wide_d = round_up(D, 16), wide_e = round_up(E, 16);
  std::vector<T> output(H * N * E), lse(H * N, -INFINITY), dq(H * N * D), dk(H * N * wide_d), dv(H * N * wide_e);
  const auto array = [](std::vector<T>& x, Index width) { return Array{x.data(), H * N * width, N * width, width}; };
  // Tile 0 sees itself below the diagonal; tile 1 sees tile 0 whole, and itself below the diagonal.
  const std::int32_t offset[H] = {}, classes[H] = {}, rows[] = {0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 2, 0}, full[] = {0};
  const std::int32_t partial[] = {0, 1}, mask[] = {0, 0}, order[] = {0, 1}, band[] = {-B, 0}, bits[B * 2] = {};
  const std::int64_t start[] = {0, B}, end[] = {N, N};
  const Axis axis{1, 2, offset, start, end};
  const Part part{axis, axis, classes, rows, full, partial, mask, order, 2};
  const Array dk_array = array(dk, wide_d), dv_array = array(dv, wide_e);
  Call call{};
  call.batch = 1, call.heads = call.key_heads = H, call.n = N, call.d = D, call.e = E, call.block = B;
  call.threads = 2, call.splits = 1, call.part_count = 1, call.mask_words = 2, call.scale = 0.2;
  call.parts = &part, call.mask_bits = bits, call.mask_band = band;
  call.query = array(q, D), call.key = array(k, D), call.value = array(v, E), call.output = array(output, E);
  call.lse = array(lse, 1), call.grad_output = array(grad, E), call.grad_query = array(dq, D);
  call.grad_key = &dk_array, call.grad_value = &dv_array;
  std::vector<T> table(H * (2 * R + 1 + 2 * P));
  std::vector<double> dtable(table.size());
  const auto entry = [](Index h, Index i, Index j) {
    return h * (2 * R + 1 + 2 * P) + P + std::clamp<Index>(i - j + R, 0, 2 * R);
  };
  for (Index h = 0; h < H; ++h)
    for (Index x = 0; x < 2 * R + 1 + 2 * P; ++x)
      table[h * (2 * R + 1 + 2 * P) + x] = T(std::sin(double(h + std::clamp<Index>(x, P, P + 2 * R))));
  call.softcap = kCap, call.bias = {table.data(), dtable.data(), 1, 1, 2 * R + 1, P, nullptr, 0};
  forward(&call);
  backward(&call);
  double worst = 0;
  const auto compare = [&](double found, double wanted) { worst = std::max(worst, std::fabs(found - wanted)); };
  for (Index h = 0; h < H; ++h) {
    std::vector<double> want_q(N * D), want_k(N * D), want_v(N * E), want_table(2 * R + 1);
    for (Index i = 0; i < N; ++i) {
      std::vector<double> weight(i + 1), ratio(i + 1);
      double total = 0, delta = 0;
      for (Index j = 0; j <= i; ++j) {
        double score = 0;
        for (Index x = 0; x < D; ++x) score += double(q[(h * N + i) * D + x]) * k[(h * N + j) * D + x];
        ratio[j] = std::tanh(0.2 * score / kCap);
        total += weight[j] = std::exp(kCap * ratio[j] + table[entry(h, i, j)]);
      }
      compare(lse[h * N + i], std::log(total));
      for (Index x = 0; x < E; ++x) {
        double sum = 0;
        for (Index j = 0; j <= i; ++j) sum += weight[j] / total * v[(h * N + j) * E + x];
        compare(output[(h * N + i) * E + x], sum);
        delta += sum * grad[(h * N + i) * E + x];
      }
      for (Index j = 0; j <= i; ++j) {
        double of_weight = 0;
        for (Index x = 0; x < E; ++x) {
          of_weight += double(grad[(h * N + i) * E + x]) * v[(h * N + j) * E + x];
          want_v[j * E + x] += weight[j] / total * grad[(h * N + i) * E + x];
        }
        const double of_bias = weight[j] / total * (of_weight - delta);
        want_table[entry(h, i, j) - entry(h, 0, R)] += of_bias;
        const double of_score = 0.2 * of_bias * (1 - ratio[j] * ratio[j]);
        for (Index x = 0; x < D; ++x) {
          want_q[i * D + x] += of_score * k[(h * N + j) * D + x];
          want_k[j * D + x] += of_score * q[(h * N + i) * D + x];
        }
      }
    }
    // The kernel adds pairs beyond the table to its padding.
    for (Index x = 0; x < 2 * R + 1; ++x) {
      const double* from = dtable.data() + entry(h, 0, R) + x;
      double found = *from;
      for (Index p = 1; p <= P && (x == 0 || x == 2 * R); ++p) found += from[x ? p : -p];
      compare(found, want_table[x]);
    }
    for (Index i = 0; i < N; ++i) {
      for (Index x = 0; x < D; ++x) compare(dq[(h * N + i) * D + x], want_q[i * D + x]);
      for (Index x = 0; x < D; ++x) compare(dk[(h * N + i) * wide_d + x], want_k[i * D + x]);
      for (Index x = 0; x < E; ++x) compare(dv[(h * N + i) * wide_e + x], want_v[i * E + x]);
    }
  }
  std::printf("%s: largest difference %.1e, at most %.0e\n", type, worst, bound);
  return worst <= bound ? 0 : 1;
}

int main(int count, char** arguments) {
  if (count != 2) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::printf("%s\n", dlerror()), 2;
  const bool same = reinterpret_cast<Index (*)()>(dlsym(library, "call_bytes"))() == Index(sizeof(Call));
  return same ? int(check<float>(library, "float", 2e-5) + check<double>(library, "double", 1e-12)) : 3;
}
