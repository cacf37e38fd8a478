// Sums with another operand, in one pass: both operands are scaled, added, and scaled again to bytes in registers. See
// `is_quick_sum` in vectors.h.
#include "vectors.h"

namespace {

// What is stored: one value of bytes, two, or the sums as they are and bytes.
enum Stored { BYTES, TWICE_BYTES, SUMS_AND_BYTES };

// Rows of `width` sums, at most 16 * V, with what does not change kept in registers. T: what the other operand is
// stored as. STRAIGHT: rows of 16 * V sums, every one of which is scaled once, and `is_straight` for what is stored.
template <int V, Stored S, typename T, bool STRAIGHT>
__attribute__((noinline)) void rows_of_sums(const Tile& tile, const Tail& t) {
  using Step = typename Quick<V>::Step;
  const Addend& a = t.addend;
  const Output &begin = t.output[0], &end = t.output[t.outputs - 1];
  const Move* before = STRAIGHT ? nullptr : a.own.first;
  const Step early(before ? *before : a.own, tile.channel), own(a.own, tile.channel), other(a.other, tile.channel);
  const Quick<V> last(end, tile.channel, tile.width);
  const Quick<V> first(S == TWICE_BYTES ? begin : end, tile.channel, tile.width);
  const Ints zero = all_ints(a.zero);
  for (int r = 0; r < tile.rows; ++r) {
    const int32_t* sums = tile.sums + r * tile.pitch;
    const T* added = reinterpret_cast<const T*>(a.data) + tile.at(r) * a.stride + tile.column;
    const int64_t from = tile.at(r) * begin.stride + tile.column, to = tile.at(r) * end.stride + tile.column;
    Ints row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int left = STRAIGHT ? 16 : tile.width - 16 * v;
      const Ints q = left >= 16 ? load_16(added + 16 * v, All{}) : load_16(added + 16 * v, First(left));
      const Ints c = load_ints(sums + 16 * v);
      row[v] = add(own(before ? early(c, v) : c, v), other(subtract(q, zero), v));
      if (S != SUMS_AND_BYTES) continue;
      int32_t* raw = reinterpret_cast<int32_t*>(begin.data) + from + 16 * v;
      if (left >= 16) store_16(raw, row[v], All{});
      else store_16(raw, row[v], First(left));
    }
    const auto store = [&](const Quick<V>& quick, uint8_t* at) __attribute__((always_inline)) {
      if constexpr (STRAIGHT) quick.straight(row, at);
      else quick(row, at);
    };
    if (S == TWICE_BYTES) store(first, reinterpret_cast<uint8_t*>(begin.data) + from);
    store(last, reinterpret_cast<uint8_t*>(end.data) + to);
  }
}

template <int V, Stored S, typename T>
void sums_stored(const Tile& tile, const Tail& t) {
  const bool last = is_straight(t.output[t.outputs - 1]), first = S != TWICE_BYTES || is_straight(t.output[0]);
  if (tile.width == 16 * V && !t.addend.own.first && first && last) rows_of_sums<V, S, T, true>(tile, t);
  else rows_of_sums<V, S, T, false>(tile, t);
}

template <int V, typename T>
void sums_of_width(const Tile& tile, const Tail& t) {
  if (t.outputs == 1) return sums_stored<V, BYTES, T>(tile, t);
  if (is_quick(t.output[0])) return sums_stored<V, TWICE_BYTES, T>(tile, t);
  sums_stored<V, SUMS_AND_BYTES, T>(tile, t);
}

template <typename T>
void sums_with(const Tile& tile, const Tail& t) {
  switch ((tile.width + 15) / 16) {
    case 1: return sums_of_width<1, T>(tile, t);
    case 2: return sums_of_width<2, T>(tile, t);
    case 3: return sums_of_width<3, T>(tile, t);
    default: return sums_of_width<4, T>(tile, t);
  }
}

}  // namespace

void end_quick_sum(const Tile& tile, const Tail& t) {
  if (t.addend.type == U8) sums_with<uint8_t>(tile, t);
  else sums_with<int32_t>(tile, t);
}
