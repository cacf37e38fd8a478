// Products of two values, neither of them constant weights: entry by entry, with one of them repeated where it is
// broadcast.
#include <algorithm>
#include <cstdint>

#include "finish.h"

namespace {

struct Operand {
  const char* data;
  int32_t type, zero;
};

// How b lies against a: [groups][repeat][inner] of a for [groups][inner] of b.
struct Spread {
  int64_t repeat, inner;
};

// Of b, what stands against the n values of a from `within` a group on.
void spread_out(const Operand& b, const Spread& s, int64_t group, int64_t within, int32_t* to, int n) {
  for (int filled = 0; filled < n;) {
    const int64_t column = (within + filled) % s.inner;
    const int some = (int)std::min<int64_t>(s.inner - column, n - filled);
    load(b.data, b.type, b.zero, group * s.inner + column, to + filled, some);
    if (s.inner == 1) std::fill(to, to + n, to[0]);
    filled = s.inner == 1 ? n : filled + some;
  }
}

// n products of bytes, centered, to bytes, in registers. `there` holds the low words of the values to multiply by.
template <typename T>
void quick_products(const T* a, int32_t a_zero, const int32_t* there, int n, int channel, const Output& o, uint8_t* to) {
  const Plain move(o.move);
  const Ints zero = all_ints(a_zero), out_zero = all_ints(o.zero);
  const auto sixteen = [&](int i, auto lanes) __attribute__((always_inline)) {
    const Ints c = subtract(load_16(a + i, lanes), zero);
    store_16(to + i, add(move.of(channel + i)(dot_words(all_ints(0), c, load_ints(there + i))), out_zero), lanes);
  };
  int i = 0;
  for (; i + LANES <= n; i += LANES) sixteen(i, All{});
  if (i < n) sixteen(i, First(n - i));
}

}  // namespace

// Products modulo 2**32 of centered integers, and their tail, whose arrays repeat every `channels` entries and are
// `period` long.
extern "C" void hago_multiply(const Tail* tail, const Operand* a, const Operand* b, const Spread* spread,
                              int64_t total, int64_t channels, int64_t period, int threads) {
  const int64_t group_size = spread->repeat * spread->inner;
  const bool quick = a->type <= I8 && b->type <= I8 && end_form_of(*tail) == QUICK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && total > PIECE)
  for (int64_t piece = 0; piece < total; piece += PIECE) {
    const int64_t end = std::min(total, piece + PIECE);
    int32_t c[ROW], there[ROW];
    int64_t known = -1, begun = -1;  // of b: the group and the column that `there` starts at
    int held = 0;
    for (int64_t at = piece; at < end;) {
      const int64_t channel = at % channels, group = at / group_size, within = at % group_size;
      const int64_t column = within % spread->inner;
      int64_t n = std::min({(int64_t)ROW, period - channel, end - at, group_size - within});
      if (spread->inner < n) n -= n % spread->inner;  // so that the next values stand against the same
      if (group != known || column != begun || n > held) {
        spread_out(*b, *spread, group, within, there, (int)n);
        known = group, begun = column, held = (int)n;
        if (quick)
          for (int i = 0; i < n; ++i) there[i] &= 0xffff;
      }
      if (quick) {
        const Output& o = tail->output[0];
        uint8_t* to = (uint8_t*)o.data + at;
        if (a->type == U8) quick_products((const uint8_t*)a->data + at, a->zero, there, (int)n, (int)channel, o, to);
        else quick_products((const int8_t*)a->data + at, a->zero, there, (int)n, (int)channel, o, to);
        at += n;
        continue;
      }
      load(a->data, a->type, a->zero, at, c, (int)n);
      for (int i = 0; i < n; ++i) c[i] = (int32_t)((uint32_t)c[i] * (uint32_t)there[i]);
      finish_rows(*tail, c, 1, (int)n, (int)n, (int)channel, 0, at);
      at += n;
    }
  }
}
