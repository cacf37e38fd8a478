// Histograms of real values: how many lie in each bin.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t RUN = 512;  // values whose bins are computed at once
constexpr int TABLES = 4;     // neighbours, which are often equal, count in tables of their own

// Shrunk by the last bit, so that the ends lie inside the outermost bins.
constexpr float INSIDE = 0x1.fffffep-1f;

// The bins of n values. A product by the power of two must be exact: one that makes values smaller is of doubles.
void find_bins(const float* x, int64_t n, double per_value, int32_t bins, int32_t* at) {
  if (per_value >= 1.0) {
    const float factor = INSIDE * (float)per_value;
    for (int64_t i = 0; i < n; ++i) at[i] = (int32_t)std::floor(x[i] * factor) + bins / 2;
  } else {
    for (int64_t i = 0; i < n; ++i) at[i] = (int32_t)std::floor((double)(x[i] * INSIDE) * per_value) + bins / 2;
  }
}

// Adds n values to TABLES tables, one after the other in memory.
void count(const float* x, int64_t n, double per_value, int32_t bins, uint32_t* table) {
  int32_t at[RUN];
  for (int64_t first = 0; first < n; first += RUN) {
    const int64_t some = std::min(RUN, n - first);
    find_bins(x + first, some, per_value, bins, at);
    int64_t i = 0;
    for (; i + TABLES <= some; i += TABLES)
      for (int t = 0; t < TABLES; ++t) ++table[(int64_t)t * bins + at[i + t]];
    for (; i < some; ++i) ++table[at[i]];
  }
}

}  // namespace

// Adds n values, none of which is beyond the outermost bins, to the counts of as many bins on each side of 0.
// `per_value` is bins per unit, a power of two. No bin gets 2**32 values at once.
extern "C" void hago_count_bins(const float* x, int64_t n, double per_value, int32_t bins, int64_t* counts,
                                int threads) {
  const int64_t part = (n + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t first = thread * part, last = std::min(n, first + part);
    if (first >= last) continue;
    std::vector<uint32_t> table((size_t)TABLES * bins);
    count(x + first, last - first, per_value, bins, table.data());
    for (int t = 1; t < TABLES; ++t)
      for (int32_t i = 0; i < bins; ++i) table[i] += table[(int64_t)t * bins + i];
#pragma omp critical
    for (int32_t i = 0; i < bins; ++i) counts[i] += table[i];
  }
}
