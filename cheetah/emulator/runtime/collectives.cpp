// Rendezvous of the 32 lanes of a warp: each lane leaves its operands in its slot, the last one computes for all.
//
// Only warp_barrier orders memory; shuffles, sums, mma and transposes do not, and the race detector is told nothing.
#include <cmath>

#include "machine.h"
#include "rendezvous.h"
#include "sanitizer.h"
#include "tiles.h"

namespace cheetah_emulator {
namespace {

// The order of the GPU's butterfly, so that the sum has the same bits as with five shuffles.
template <class Combine>
void butterfly(Warp& warp, Combine combine) {
  float values[warp_lanes], others[warp_lanes];
  for (uint32_t lane = 0; lane < warp_lanes; lane++) values[lane] = warp.slots[lane].number;
  for (uint32_t distance = 16; distance; distance /= 2) {
    for (uint32_t lane = 0; lane < warp_lanes; lane++) others[lane] = values[lane ^ distance];
    for (uint32_t lane = 0; lane < warp_lanes; lane++) values[lane] = combine(values[lane], others[lane]);
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++) warp.slots[lane].number = values[lane];
}

struct Bf16 {  // how a word holds two numbers
  static float first(uint32_t pair) { return low(pair); }
  static float second(uint32_t pair) { return high(pair); }
};

struct F16 {
  static float first(uint32_t pair) { return f32_of_f16(pair & 0xFFFF); }
  static float second(uint32_t pair) { return f32_of_f16(pair >> 16); }
};

// PTX's fragments: lane 4*g + t holds rows g, g+8 of A and C, column g of B.
template <class Pair>
void gather(const Warp& warp, Operands& m) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const Slot& slot = warp.slots[lane];
    const uint32_t g = lane / 4, pair = lane % 4 * 2;
    for (uint32_t half = 0; half < 2; half++) {
      m.b[pair + 8 * half][g] = Pair::first(slot.b[half]);
      m.b[pair + 8 * half + 1][g] = Pair::second(slot.b[half]);
      for (uint32_t lower = 0; lower < 2; lower++) {
        m.a[g + 8 * lower][pair + 8 * half] = Pair::first(slot.a[2 * half + lower]);
        m.a[g + 8 * lower][pair + 8 * half + 1] = Pair::second(slot.a[2 * half + lower]);
      }
      m.c[g + 8 * half][pair] = slot.c[2 * half];
      m.c[g + 8 * half][pair + 1] = slot.c[2 * half + 1];
    }
  }
}

void scatter(Warp& warp, const Operands& m) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const uint32_t g = lane / 4, pair = lane % 4 * 2;
    for (uint32_t half = 0; half < 2; half++) {
      warp.slots[lane].c[2 * half] = m.c[g + 8 * half][pair];
      warp.slots[lane].c[2 * half + 1] = m.c[g + 8 * half][pair + 1];
    }
  }
}

template <class Pair>
void multiply(Warp& warp) {
  Operands operands;
  gather<Pair>(warp, operands);
  add_product(operands);
  scatter(warp, operands);
}

// The same places with four bytes k for two numbers: lane 4*g + t has bytes 4t .. 4t+3 and 16 more on of rows g, g+8.
void multiply_bytes(Warp& warp) {
  uint8_t a[16][32];
  int8_t b[8][32];
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const Slot& slot = warp.slots[lane];
    const uint32_t g = lane / 4, first = lane % 4 * 4;
    for (uint32_t byte = 0; byte < 8; byte++) {
      const uint32_t half = byte / 4, shift = byte % 4 * 8, k = first + 16 * half + byte % 4;
      b[g][k] = int8_t(slot.b[half] >> shift);
      for (uint32_t lower = 0; lower < 2; lower++) a[g + 8 * lower][k] = uint8_t(slot.a[2 * half + lower] >> shift);
    }
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      int32_t sum = 0;
      for (uint32_t k = 0; k < 32; k++) sum += a[row][k] * b[column][k];
      int32_t& place = warp.slots[lane].sums_of_bytes[i];
      place = int32_t(uint32_t(place) + uint32_t(sum));
    }
  }
}

// movmatrix: an 8x8 matrix of 16-bit values, lane 4*row + t holding columns 2t and 2t+1.
void transpose(Warp& warp) {
  uint16_t matrix[8][8];
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    matrix[lane / 4][lane % 4 * 2] = uint16_t(warp.slots[lane].word);
    matrix[lane / 4][lane % 4 * 2 + 1] = uint16_t(warp.slots[lane].word >> 16);
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    warp.slots[lane].word = uint32_t(matrix[column + 1][row]) << 16 | matrix[column][row];
  }
}

}  // namespace

void warp_barrier(Place place) {
  Warp& warp = *machine.current->warp;
  const char& order = warp.order[warp.generation & 1];
  sanitizer::release(order);
  rendezvous(Collective::warp_barrier, place, "warp_barrier", [](Warp& w) { w.generation++; });
  sanitizer::acquire(order);
}

uint32_t shuffle_xor(uint32_t value, uint32_t mask, Place place, const char* primitive) {
  Slot& slot = my_slot();
  slot.word = value;
  slot.argument = machine.current->lane ^ mask;
  rendezvous(Collective::shuffle_xor, place, primitive, [](Warp& warp) {
    uint32_t values[warp_lanes];
    for (uint32_t lane = 0; lane < warp_lanes; lane++) values[lane] = warp.slots[lane].word;
    for (uint32_t lane = 0; lane < warp_lanes; lane++)
      warp.slots[lane].word = values[warp.slots[lane].argument % warp_lanes];
  });
  return slot.word;
}

uint32_t shuffle(uint32_t value, uint32_t lane, Place place, const char* primitive) {
  return shuffle_xor(value, lane ^ machine.current->lane, place, primitive);
}

float warp_sum(float value, Place place) {
  require_whole_warp(place, "warp_sum_f32");
  Slot& slot = my_slot();
  slot.number = value;
  rendezvous(Collective::sum, place, "warp_sum_f32",
             [](Warp& warp) { butterfly(warp, [](float a, float b) { return a + b; }); });
  return slot.number;
}

namespace {

void mma_of_numbers(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place, const char* primitive,
                    Collective kind, void (*multiplied)(Warp&)) {
  require_whole_warp(place, primitive);
  Slot& slot = my_slot();
  for (int i = 0; i < 4; i++) {
    slot.a[i] = a[i];
    slot.c[i] = c[i];
  }
  slot.b[0] = b0;
  slot.b[1] = b1;
  rendezvous(kind, place, primitive, multiplied);
  for (int i = 0; i < 4; i++) c[i] = slot.c[i];
}

}  // namespace

void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place) {
  mma_of_numbers(c, a, b0, b1, place, "mma_bf16", Collective::mma, multiply<Bf16>);
}

void mma_halves(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place) {
  mma_of_numbers(c, a, b0, b1, place, "mma_f16", Collective::mma_halves, multiply<F16>);
}

void mma_bytes(int32_t* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place) {
  require_whole_warp(place, "mma_u8_s8");
  Slot& slot = my_slot();
  for (int i = 0; i < 4; i++) {
    slot.a[i] = a[i];
    slot.sums_of_bytes[i] = c[i];
  }
  slot.b[0] = b0;
  slot.b[1] = b1;
  rendezvous(Collective::mma_bytes, place, "mma_u8_s8", multiply_bytes);
  for (int i = 0; i < 4; i++) c[i] = slot.sums_of_bytes[i];
}

uint32_t matrix_transpose(uint32_t value, Place place) {
  require_whole_warp(place, "matrix_transpose_b16");
  Slot& slot = my_slot();
  slot.word = value;
  rendezvous(Collective::transpose, place, "matrix_transpose_b16", transpose);
  return slot.word;
}

}  // namespace cheetah_emulator
