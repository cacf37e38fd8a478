// Passes over whole values: requantize or add, pooling, tables. Channels lie innermost where they matter.
#include <algorithm>
#include <cstdint>

#include "finish.h"
#include "pool_window.h"
#include "table.h"

namespace {

template <typename T>
void max_pool(const Window& w, const T* x, T* out, int threads) {
  each_window(w, threads, [&](const Windowed& window, int64_t pixel) {
    max_row(window, x, w.channels, out + pixel * w.channels);
  });
}

}  // namespace

// Everything that `finish` does, on a stored value: `period` channels repeat, and the arrays are so long.
extern "C" void hago_rows(const Tail* tail, const char* x, int type, int zero, int64_t total, int64_t period,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && total > PIECE)
  for (int64_t piece = 0; piece < total; piece += PIECE) {
    const int64_t end = std::min(total, piece + PIECE);
    int32_t c[ROW];
    for (int64_t at = piece; at < end;) {
      const int64_t channel = at % period, n = std::min({(int64_t)ROW, period - channel, end - at});
      load(x, type, zero, at, c, (int)n);
      finish_rows(*tail, c, 1, (int)n, (int)n, (int)channel, 0, at);
      at += n;
    }
  }
}

extern "C" void hago_max_pool(const Window* w, int type, const char* x, char* out, int threads) {
  if (type == U8) return max_pool(*w, (const uint8_t*)x, (uint8_t*)out, threads);
  if (type == I8) return max_pool(*w, (const int8_t*)x, (int8_t*)out, threads);
  if (type == I16) return max_pool(*w, (const int16_t*)x, (int16_t*)out, threads);
  max_pool(*w, (const int32_t*)x, (int32_t*)out, threads);
}

// Sums of windows modulo 2**32, of centered integers; arrays of the tail are `period` long.
extern "C" void hago_sum_pool(const Window* w, const Tail* tail, int type, int zero, const char* x, int64_t period,
                              int threads) {
  each_window(*w, threads, [&](const Windowed& window, int64_t pixel) {
    for (int64_t channel = 0; channel < w->channels; channel += ROW) {
      const int n = (int)std::min<int64_t>(ROW, w->channels - channel);
      int32_t there[ROW], sum[ROW] = {};
      window.inside([&](int64_t at) {
        load(x, type, zero, at + channel, there, n);
        for (int i = 0; i < n; ++i) sum[i] = (int32_t)((uint32_t)sum[i] + (uint32_t)there[i]);
      });
      finish(sum, n, (int)(channel % period), pixel, *tail, channel);
    }
  });
}

// Bytes through a table of 256.
extern "C" void hago_table(const uint8_t* x, const uint8_t* entries, uint8_t* out, int64_t total, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && total > PIECE)
  for (int64_t piece = 0; piece < total; piece += PIECE)
    look_up(x + piece, entries, out + piece, std::min(PIECE, total - piece));
}

// Pairs of bytes through a table of 256 times 256.
extern "C" void hago_pair_table(const uint8_t* a, const uint8_t* b, const uint8_t* entries, uint8_t* out, int64_t total,
                                int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && total > PIECE)
  for (int64_t i = 0; i < total; ++i) out[i] = entries[256 * a[i] + b[i]];
}
