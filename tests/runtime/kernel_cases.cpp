// Runs the convolutions of a file of cases, and compares their sums with those in the file, and what is stored after
// a requantization with a plain loop. See test_other_processors.py, which writes the file.
#include <cmath>
#include <cstdio>
#include <vector>

#include "conv.h"

extern "C" void hago_conv(const Conv* conv, const Shape* shape, const Tail* tail, const uint8_t* x, int threads);
extern "C" int hago_widest_panel();
extern "C" int hago_adds_bytes(int by_channel);
extern "C" int hago_reads_signed();
extern "C" int hago_winograd_channels();

namespace {

template <typename T>
std::vector<T> read(std::FILE* file) {
  int64_t n = 0;
  if (std::fread(&n, sizeof(n), 1, file) != 1) return {};
  std::vector<T> values(n);
  if (std::fread(values.data(), sizeof(T), n, file) != (size_t)n) std::exit(2);
  return values;
}

int64_t differing(const std::vector<uint8_t>& bytes, const std::vector<int32_t>& sums, const Conv& conv,
                  const Output& o) {
  int64_t wrong = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    const float v = std::rint((float)sums[i] * o.move.ratio[i % conv.out_channels]);
    wrong += bytes[i] != (uint8_t)((int)std::fmin(std::fmax(v, o.move.least), o.move.most) + o.zero);
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::printf("%d %d %d %d %d\n", hago_widest_panel(), hago_adds_bytes(0), hago_adds_bytes(1), hago_reads_signed(),
                hago_winograd_channels());
    return 0;
  }
  std::FILE* file = std::fopen(arguments[1], "rb");
  int64_t cases = 0, wrong = 0, total = 0;
  for (std::vector<int32_t> fields = read<int32_t>(file); !fields.empty(); fields = read<int32_t>(file), ++cases) {
    Conv conv{};
    std::memcpy(&conv, fields.data(), fields.size() * sizeof(int32_t));
    const std::vector<int64_t> sizes = read<int64_t>(file);
    const std::vector<int8_t> weight = read<int8_t>(file);
    const std::vector<int32_t> offset = read<int32_t>(file);
    const std::vector<uint8_t> zeros = read<uint8_t>(file), x = read<uint8_t>(file);
    const std::vector<int32_t> fours = read<int32_t>(file), places = read<int32_t>(file);
    const std::vector<int32_t> four_taps = read<int32_t>(file), exact = read<int32_t>(file);
    conv.weight = weight.data(), conv.offset = offset.data(), conv.zeros = zeros.data();
    if (!fours.empty()) conv.four_starts = fours.data(), conv.places = places.data(), conv.four_taps = four_taps.data();
    const Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
    std::vector<int32_t> sums(exact.size());
    Tail tail{};
    tail.outputs = 1;
    Output& output = tail.output[0];
    output.type = I32, output.stride = conv.out_channels, output.data = (char*)sums.data();
    hago_conv(&conv, &shape, &tail, x.data(), 1);
    for (size_t i = 0; i < sums.size(); ++i) wrong += sums[i] != exact[i];
    std::vector<float> ratio(conv.out_channels + 1024);
    for (size_t i = 0; i < ratio.size(); ++i) ratio[i] = (float)(1e-4 + 1e-5 * (i * 7 % 31));
    std::vector<uint8_t> bytes(exact.size());
    output.data = (char*)bytes.data(), output.move.form = RATIO, output.move.plain = 1, output.move.ratio = ratio.data();
    const auto store = [&](Type type, int zero, int low, int high, int threads) {
      output.type = type, output.zero = zero;
      output.move.low = output.move.least = low - zero, output.move.high = output.move.most = high - zero;
      std::fill(bytes.begin(), bytes.end(), 0);
      hago_conv(&conv, &shape, &tail, x.data(), threads);
      wrong += differing(bytes, exact, conv, output);
      total += exact.size();
    };
    store(U8, 37, 0, 255, 1000);  // blocks of single pixels where there are few
    output.move.bounded = 1;
    store(U8, 37, 0, 255, 1);
    store(I8, -5, -128, 127, 1);
    store(I8, 3, -120, 100, 1);
    total += exact.size();
  }
  std::printf("%lld cases, %lld of %lld values are wrong\n", (long long)cases, (long long)wrong, (long long)total);
  return wrong != 0;
}
