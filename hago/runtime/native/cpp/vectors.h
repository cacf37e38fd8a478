// What `finish` does, 16 sums at a time, for tails whose moves are all plain (see rows.h).
#pragma once
#include "lanes.h"
#include "rows.h"

inline bool is_plain(const Move& m) {
  return (m.form == AS_IS || m.plain) && (!m.first || m.first->plain);
}

// Whether `finish_tile` can stand for `finish`.
inline bool is_plain(const Tail& t) {
  bool plain = t.sums.is_idle() && t.added.is_idle();
  if (t.adds) plain = plain && is_plain(t.addend.own) && is_plain(t.addend.other);
  for (int k = 0; k < t.outputs; ++k)
    plain = plain && (t.output[k].move.form == TO_REAL || is_plain(t.output[k].move));
  return plain;
}

// Whether `Quick` can store an output.
inline bool is_quick(const Output& o) {
  return o.type <= I8 && o.move.form == RATIO && (!o.move.first || o.move.first->form == RATIO);
}

// Whether `Quick::straight` can store whole rows of a quick output.
inline bool is_straight(const Output& o) { return !o.move.first && o.move.bounded; }

// Whether an output is the sums as they are.
inline bool is_raw(const Output& o) { return o.move.form == AS_IS && o.type == I32 && o.zero == 0 && !o.move.first; }

// Whether `end_quick_sum` can stand for `finish` of a plain tail: bytes or sums are added, and one or two outputs are
// bytes, or the sums and bytes.
inline bool is_quick_sum(const Tail& t) {
  const Addend& a = t.addend;
  const bool scaled = a.own.form == RATIO && (!a.own.first || a.own.first->form == RATIO) && a.other.form == RATIO;
  if (t.adds != PLUS || t.clamps || !scaled || a.other.first || (a.type != U8 && a.type != I32)) return false;
  if (t.outputs == 1) return is_quick(t.output[0]);
  return t.outputs == 2 && (is_quick(t.output[0]) || is_raw(t.output[0])) && is_quick(t.output[1]);
}

// What there is to do with sums: `quanta` and a store of bytes; a store as they are; or `finish`.
enum EndForm { QUICK, RAW, ANY };

inline EndForm end_form_of(const Tail& t) {
  const Output& o = t.output[0];
  if (!is_plain(t) || t.adds || t.clamps || t.outputs != 1) return ANY;
  if (is_quick(o)) return QUICK;
  return is_raw(o) ? RAW : ANY;
}

// ---------------------------------------------------------------- moves
inline Ints scaled(Ints c, Floats ratio, Floats least, Floats most) {
  const Floats v = multiply(to_floats(c), ratio);
  return to_ints(smaller(larger(v, least), most));
}

// One step of a plain Move, with its range in registers.
struct Scaling {
  const Move& m;
  const Floats least, most;
  const Ints low, high;

  explicit Scaling(const Move& m)
      : m(m), least(all_floats(m.least)), most(all_floats(m.most)), low(all_ints((int32_t)m.low)),
        high(all_ints((int32_t)m.high)) {}

  ALWAYS Floats ratio(int channel) const { return m.form == RATIO ? load_floats(m.ratio + channel) : all_floats(0); }

  ALWAYS Ints operator()(Ints c, Floats ratio, int channel) const {
    if (m.form == RATIO) return scaled(c, ratio, least, most);
    const Ints by = load_ints(m.multiplier + channel), shift = load_ints(m.shift + channel);
    if (m.form == TWO_STAGE) c = shift_away(doubling_high(c, by), subtract(shift, all_ints(31)));
    else c = multiply_shift(c, by, shift);
    return smaller(larger(c, low), high);
  }
};

// A plain Move. `of(channel)` moves sums of sixteen channels.
struct Plain {
  const Scaling first, last;
  const bool as_is, twice;

  explicit Plain(const Move& m) : first(m.first ? *m.first : m), last(m), as_is(m.form == AS_IS), twice(m.first) {}

  ALWAYS auto of(int channel) const {
    return [this, channel, before = first.ratio(channel), after = last.ratio(channel)](Ints c)
        __attribute__((always_inline)) {
          if (as_is) return c;
          if (twice) c = first(c, before, channel);
          return last(c, after, channel);
        };
  }
};

// ---------------------------------------------------------------- tiles
// Rows of sums, `pitch` from one to the next; the first is row `row` of what is stored, from `column` on, and the
// others follow it there or lie where `order` says.
struct Tile {
  int32_t* sums;
  int rows, pitch, width, channel;
  int64_t row, column;
  const int64_t* order = nullptr;

  int64_t at(int r) const { return order ? order[r] : row + r; }
};

// Calls `pass(column, lanes)` for the columns of a tile, sixteen at a time.
template <typename Pass>
ALWAYS void by_columns(const Tile& t, Pass pass) {
  int i = 0;
  for (; i + 16 <= t.width; i += 16) pass(i, All{});
  if (i < t.width) pass(i, First(t.width - i));
}

// The sum with another operand, and a clamp that follows it.
template <typename T, typename Sum>
void add_tile(const Tile& t, const Tail& tail, Sum sum) {
  const Addend& a = tail.addend;
  const Ints zero = all_ints(a.zero);
  const Plain own_of(a.own), other_of(a.other);
  by_columns(t, [&](int i, auto lanes) {
    const auto own = own_of.of(t.channel + i), other = other_of.of(t.channel + i);
    const T* data = reinterpret_cast<const T*>(a.data) + t.column + i;
    const Ints least = tail.clamps ? load_ints(tail.clamp_low + t.channel + i) : all_ints(INT32_MIN);
    const Ints most = tail.clamps ? load_ints(tail.clamp_high + t.channel + i) : all_ints(INT32_MAX);
    for (int r = 0; r < t.rows; ++r) {
      const Ints there = subtract(load_16(data + t.at(r) * a.stride, lanes), zero);
      int32_t* sums = t.sums + r * t.pitch + i;
      store_16(sums, smaller(larger(sum(own(load_ints(sums)), other(there)), least), most), All{});
    }
  });
}

template <typename Sum>
void add_tile_of(const Tile& tile, const Tail& t, Sum sum) {
  switch (t.addend.type) {
    case U8: return add_tile<uint8_t>(tile, t, sum);
    case I8: return add_tile<int8_t>(tile, t, sum);
    case I16: return add_tile<int16_t>(tile, t, sum);
    default: return add_tile<int32_t>(tile, t, sum);
  }
}

inline void clamp_tile(const Tile& t, const int32_t* low, const int32_t* high) {
  by_columns(t, [&](int i, auto) {
    const Ints least = load_ints(low + t.channel + i), most = load_ints(high + t.channel + i);
    for (int r = 0; r < t.rows; ++r) {
      int32_t* sums = t.sums + r * t.pitch + i;
      store_16(sums, smaller(larger(load_ints(sums), least), most), All{});
    }
  });
}

inline void real_tile(const Tile& t, const Output& o) {
  by_columns(t, [&](int i, auto lanes) {
    const Floats ratio = load_floats(o.move.ratio + t.channel + i);
    float* data = reinterpret_cast<float*>(o.data) + t.column + i;
    for (int r = 0; r < t.rows; ++r)
      store_16(data + t.at(r) * o.stride, multiply(to_floats(load_ints(t.sums + r * t.pitch + i)), ratio), lanes);
  });
}

inline void raw_tile(const Tile& t, const Output& o) {
  by_columns(t, [&](int i, auto lanes) {
    int32_t* data = reinterpret_cast<int32_t*>(o.data) + t.column + i;
    for (int r = 0; r < t.rows; ++r)
      store_16(data + t.at(r) * o.stride, load_ints(t.sums + r * t.pitch + i), lanes);
  });
}

template <typename T>
void store_tile(const Tile& t, const Output& o) {
  const Ints zero = all_ints(o.zero);
  const Plain plain(o.move);
  by_columns(t, [&](int i, auto lanes) {
    const auto move = plain.of(t.channel + i);
    T* data = reinterpret_cast<T*>(o.data) + t.column + i;
    for (int r = 0; r < t.rows; ++r)
      store_16(data + t.at(r) * o.stride, add(move(load_ints(t.sums + r * t.pitch + i)), zero), lanes);
  });
}

// ---------------------------------------------------------------- bytes straight from registers
// Rows of `width` sums, at most 16 * V, to bytes, with what does not change kept in registers.
template <int V>
struct Quick {
  struct Step {
    Floats ratio[V], least, most;

    Step(const Move& m, int channel) : least(all_floats(m.least)), most(all_floats(m.most)) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) ratio[v] = load_floats(m.ratio + channel + 16 * v);
    }
    Ints operator()(Ints c, int v) const { return scaled(c, ratio[v], least, most); }
  };
  const bool twice, words;  // words: clipped as words, all of a row together
  const Step first, last;
  const Ints zero;
  const ByteRange range;
  const int width;

  Quick(const Output& o, int channel, int width)
      : twice(o.move.first), words(width % 8 == 0 && width > 16 * (V - 1) && o.move.bounded),
        first(twice ? *o.move.first : o.move, channel), last(o.move, channel), zero(all_ints(o.zero)),
        range(o.type == I8, o.zero, (int)o.move.low, (int)o.move.high), width(width) {}

  // A row of 16 * V sums, scaled once and clipped as words, with no branches but those of the range.
  ALWAYS void straight(const Ints (&row)[V], uint8_t* to) const {
    Ints q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) q[v] = to_ints(multiply(to_floats(row[v]), last.ratio[v]));
    store_bytes(to, q, 16 * V, range);
  }

  ALWAYS void operator()(const Ints (&row)[V], uint8_t* to) const {
    Ints q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      q[v] = twice ? first(row[v], v) : row[v];
      q[v] = words ? to_ints(multiply(to_floats(q[v]), last.ratio[v])) : add(last(q[v], v), zero);
    }
    if (words) return store_bytes(to, q, width, range);
    if constexpr (V == 4)
      if (width == 64) return store_64(to, q[0], q[1], q[2], q[3]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if (width >= 16 * (v + 1)) store_16(to + 16 * v, q[v], All{});
      else store_16(to + 16 * v, q[v], First(width - 16 * v));
    }
  }
};

// Bytes of a tile, one row after the other.
template <int V>
__attribute__((noinline)) void end_quick_of(const Output& o, const Tile& tile) {
  const Quick<V> quick(o, tile.channel, tile.width);
  const bool straight = tile.width == 16 * V && is_straight(o);
  for (int r = 0; r < tile.rows; ++r) {
    uint8_t* to = reinterpret_cast<uint8_t*>(o.data) + tile.at(r) * o.stride + tile.column;
    Ints row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = load_ints(tile.sums + r * tile.pitch + 16 * v);
    if (straight) quick.straight(row, to);
    else quick(row, to);
  }
}

inline void end_quick(const Output& o, const Tile& tile) {
  switch ((tile.width + 15) / 16) {
    case 1: return end_quick_of<1>(o, tile);
    case 2: return end_quick_of<2>(o, tile);
    case 3: return end_quick_of<3>(o, tile);
    default: return end_quick_of<4>(o, tile);
  }
}

void end_quick_sum(const Tile& tile, const Tail& t);  // quick_sums.cpp

// ---------------------------------------------------------------- all that follows the sums
// Bytes keep their low 8 bits, so that int8 and uint8 are stored alike.
inline void finish_tile(const Tile& tile, const Tail& t) {
  if (tile.width <= 64 && is_quick_sum(t)) return end_quick_sum(tile, t);
  const auto plus = [](Ints own, Ints other) { return add(own, other); };
  const auto minus = [](Ints own, Ints other) { return subtract(own, other); };
  const auto from = [](Ints own, Ints other) { return subtract(other, own); };
  if (t.adds == PLUS) add_tile_of(tile, t, plus);
  if (t.adds == MINUS) add_tile_of(tile, t, minus);
  if (t.adds == FROM) add_tile_of(tile, t, from);
  if (t.clamps && !t.adds) clamp_tile(tile, t.clamp_low, t.clamp_high);
  for (int k = 0; k < t.outputs; ++k) {
    const Output& o = t.output[k];
    if (o.move.form == TO_REAL) real_tile(tile, o);
    else if (is_raw(o)) raw_tile(tile, o);
    else if (is_quick(o) && tile.width <= 64) end_quick(o, tile);
    else if (o.type <= I8) store_tile<uint8_t>(tile, o);
    else if (o.type == I16) store_tile<int16_t>(tile, o);
    else store_tile<int32_t>(tile, o);
  }
}
