// The arithmetic of tensor cores: 16 x 16 times 16 x 8 bf16 numbers, added to float.
#pragma once

#include "machine.h"

namespace cheetah_emulator {

typedef float Row __attribute__((vector_size(32)));  // 8 columns

struct Operands {
  alignas(32) float a[16][16], b[16][8], c[16][8];  // [row][k], [k][column], [row][column]
};

inline float low(uint32_t pair) { return bits_float(pair << 16); }
inline float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }

// Products of two bf16 are exact in float; the sum over k runs upwards from C, so the bits do not depend on the
// machine's vector width. Four rows at a time keep the adders busy.
[[gnu::always_inline]] inline void sum_products(Operands& m) {
  for (uint32_t row = 0; row < 16; row += 4) {
    Row sums[4];
    for (uint32_t r = 0; r < 4; r++) sums[r] = *reinterpret_cast<const Row*>(m.c[row + r]);
    for (uint32_t k = 0; k < 16; k++) {
      const Row b = *reinterpret_cast<const Row*>(m.b[k]);
      for (uint32_t r = 0; r < 4; r++) sums[r] += m.a[row + r][k] * b;
    }
    for (uint32_t r = 0; r < 4; r++) *reinterpret_cast<Row*>(m.c[row + r]) = sums[r];
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] inline void sum_products_avx2(Operands& m) { sum_products(m); }
inline const bool has_avx2 = __builtin_cpu_supports("avx2");
#else
inline void sum_products_avx2(Operands&) {}
inline constexpr bool has_avx2 = false;
#endif

// m.c += m.a * m.b
inline void add_product(Operands& m) {
  if (has_avx2) sum_products_avx2(m);
  else sum_products(m);
}

}  // namespace cheetah_emulator
