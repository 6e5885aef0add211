// What a generated kernel's text sees on the CPU: CUDA's words as far as kernels use them, and the primitives.
//
// The text is compiled with -DCHEETAH_EMULATOR as C++20. Every CUDA thread is a fibre (machine.h), so a primitive
// that waits hands the processor to another fibre. The runtime behind the declarations of `cheetah_emulator` is
// compiled apart, without the sanitizer, also when this text is compiled with it: what stands in this header is
// seen by the race detector as the kernel's own accesses, what stands in the runtime is not.
// It is read with every kernel, and <cmath> alone would cost more than half of a small kernel's time in g++: functions
// of mathematics are called as the compiler's own.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>

#define __global__
#define __device__
#define __host__
// A kernel's functions stay functions: inlined wherever they are called, they would cost g++ twice the time, and the
// emulator hardly less.
#define __forceinline__ inline __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(2) bf16 { uint16_t bits; };

// As CUDA has them, of two integers alike; two templates' types, since C++ knows two unsigned integers of 64 bits.
template <class A, class B> auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) { return a < b ? b : a; }

namespace cheetah_emulator {

using Place = std::source_location;  // one pointer; the line of the kernel text that called a primitive

struct Index3 { uint32_t x, y, z; };

struct Identity {  // of the thread that runs now
  Index3 thread, block;
  uint8_t* arena;  // the block's dynamic shared memory
};

#pragma GCC visibility push(hidden)
extern const Identity* identity;
extern Index3 block_dimensions, grid_dimensions;

void preemption_point(Place place, const char* primitive);
void check_global(const void* address, uint64_t bytes, uint64_t alignment, Place place, const char* primitive);
void words_written(const void* address);
// Whether the word is another rank's, which it then reaches later.
bool store_to_peer(void* address, uint64_t word, uint32_t bytes, uint32_t epoch, bool is_release, Place place,
                   const char* primitive);
// The same of a counter that it adds to, and of memory that nobody waits for.
bool add_to_peer(uint64_t* counter, uint64_t value, Place place, const char* primitive);
void data_to_peer(void* address, const void* data, uint32_t bytes, Place place, const char* primitive);
void begin_counter_wait(const uint64_t* counter, Place place, const char* primitive);
void enter_system_scope();
void leave_system_scope();
void tagged(const uint32_t* word, uint32_t epoch);
void check_epochs(const uint32_t* words, uint32_t epoch, Place place, const char* primitive);
constexpr uint32_t tag_bits = 0x40004000;  // of a tagged word
void begin_word_wait(const void* words, uint32_t word_bytes, Place place, const char* primitive);
void wait_for_flags(const uint64_t* words, uint32_t epoch, Place place, const char* primitive);
void wait_for_tags(const uint32_t* words, uint32_t tag, Place place, const char* primitive);
void wait_for_at_least(const uint64_t* word, uint64_t value, Place place);
uint64_t virtual_nanoseconds();

void block_barrier(Place place);
void named_barrier(uint32_t id, uint32_t threads, Place place);
void warp_barrier(Place place);
uint32_t shuffle_xor(uint32_t value, uint32_t mask, Place place, const char* primitive);
uint32_t shuffle(uint32_t value, uint32_t lane, Place place, const char* primitive);
float warp_sum(float value, Place place);
void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place);
void mma_halves(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place);
void mma_bytes(int32_t* c, const uint32_t* a, uint32_t b0, uint32_t b1, Place place);
void mma_2of4(float* c, const uint32_t* a, const uint32_t* b, uint32_t metadata, uint32_t selector, Place place,
              const char* primitive);
void mma_2of4_bytes(int32_t* c, const uint32_t* a, const uint32_t* b, uint32_t metadata, Place place);
uint32_t matrix_transpose(uint32_t value, Place place);
uint32_t* const* rows_of_lanes(const void* row, Place place, const char* primitive);
uint64_t matrix_descriptor(const void* start, uint32_t leading, uint32_t stride, Place place);
void wgmma_fence(Place place);
void wgmma(float* sums, const uint32_t* a, uint64_t descriptor, bool accumulate, uint32_t columns, bool transposed,
           Place place, const char* primitive);
void wgmma_commit(Place place);
void wgmma_wait(uint32_t left, Place place, const char* primitive);

void mbarrier_init(uint64_t* barrier, uint32_t arrivals, Place place);
void mbarrier_arrive(uint64_t* barrier, uint32_t transaction_bytes, Place place, const char* primitive);
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Place place);
void bulk_copy(void* destination, const void* source, uint32_t bytes, uint64_t* barrier, Place place);
void bulk_copy_shared(void* destination, const void* source, uint32_t bytes, uint64_t* barrier, Place place);
void fence_proxy_async(Place place);
void loads_have_read(Place place);
void check_constant(const void* address, uint32_t bytes, Place place, const char* primitive);
#pragma GCC visibility pop

}  // namespace cheetah_emulator

#define threadIdx (cheetah_emulator::identity->thread)
#define blockIdx (cheetah_emulator::identity->block)
#define blockDim (cheetah_emulator::block_dimensions)
#define gridDim (cheetah_emulator::grid_dimensions)

// ---- The primitives: one function each, named and typed as the kernel text calls them -------------------------------
// The last parameter is filled in by the compiler at the call: reports name the line of the kernel text.

#define CHEETAH_PLACE cheetah_emulator::Place place = cheetah_emulator::Place::current()
#define CHEETAH_INLINE static inline __attribute__((always_inline, unused))
#define CHEETAH_PRIMITIVE CHEETAH_INLINE

// Start of the block's dynamic shared memory, 1024-aligned, NaN (0xFF) when the launch begins.
CHEETAH_PRIMITIVE uint8_t* shared_arena() { return cheetah_emulator::identity->arena; }

// -- rendezvous of a block

CHEETAH_PRIMITIVE uint32_t thread_index() { return threadIdx.x; }
CHEETAH_PRIMITIVE void block_barrier(CHEETAH_PLACE) { cheetah_emulator::block_barrier(place); }

CHEETAH_PRIMITIVE void named_barrier(uint32_t id, uint32_t threads, CHEETAH_PLACE) {
  cheetah_emulator::named_barrier(id, threads, place);
}


// -- rendezvous of a warp: all its lanes, one meeting each

CHEETAH_PRIMITIVE void warp_barrier(CHEETAH_PLACE) { cheetah_emulator::warp_barrier(place); }

CHEETAH_PRIMITIVE uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

CHEETAH_PRIMITIVE float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

CHEETAH_PRIMITIVE float infinity() { return bits_float(0x7F800000u); }
CHEETAH_PRIMITIVE float not_a_number() { return bits_float(0x7FFFFFFFu); }

CHEETAH_PRIMITIVE uint32_t shuffle_xor_u32(uint32_t value, uint32_t mask, CHEETAH_PLACE) {
  return cheetah_emulator::shuffle_xor(value, mask, place, "shuffle_xor_u32");
}

CHEETAH_PRIMITIVE float shuffle_xor_f32(float value, uint32_t mask, CHEETAH_PLACE) {
  return bits_float(cheetah_emulator::shuffle_xor(float_bits(value), mask, place, "shuffle_xor_f32"));
}

CHEETAH_PRIMITIVE uint32_t shuffle_u32(uint32_t value, uint32_t lane, CHEETAH_PLACE) {
  return cheetah_emulator::shuffle(value, lane, place, "shuffle_u32");
}


CHEETAH_PRIMITIVE float warp_sum_f32(float value, CHEETAH_PLACE) { return cheetah_emulator::warp_sum(value, place); }

CHEETAH_PRIMITIVE uint32_t warp_maximum_u32(uint32_t value, CHEETAH_PLACE) {
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = cheetah_emulator::shuffle_xor(value, mask, place, "warp_maximum_u32");
    value = other > value ? other : value;
  }
  return value;
}

CHEETAH_PRIMITIVE uint32_t warp_sum_u32(uint32_t value, CHEETAH_PLACE) {
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    value += cheetah_emulator::shuffle_xor(value, mask, place, "warp_sum_u32");
  }
  return value;
}


// D = A (16x16, row major fragments a.x..a.w) * B (16x8, b0 b1) + C (16x8), as mma.m16n8k16 bf16 with float sums.
CHEETAH_PRIMITIVE void mma_bf16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1, CHEETAH_PLACE) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
  float sums[4] = {c[0], c[1], c[2], c[3]};
  cheetah_emulator::mma(sums, words, b0, b1, place);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

// The same with f16 numbers.
CHEETAH_PRIMITIVE void mma_f16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1, CHEETAH_PLACE) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
  float sums[4] = {c[0], c[1], c[2], c[3]};
  cheetah_emulator::mma_halves(sums, words, b0, b1, place);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

// D = A (16x32 unsigned bytes) * B (32x8 signed bytes) + C (16x8), as mma.m16n8k32 u8 s8 with s32 sums, which wrap.
CHEETAH_PRIMITIVE void mma_u8_s8(int32_t (&c)[4], uint4 a, uint32_t b0, uint32_t b1, CHEETAH_PLACE) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
  int32_t sums[4] = {c[0], c[1], c[2], c[3]};
  cheetah_emulator::mma_bytes(sums, words, b0, b1, place);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

inline void mma_2of4_bf16(float (&c)[4], uint4 a, uint4 b, uint32_t metadata, uint32_t selector,
                          cheetah_emulator::Place place, const char* primitive) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w}, values[4] = {b.x, b.y, b.z, b.w};
  float sums[4] = {c[0], c[1], c[2], c[3]};
  cheetah_emulator::mma_2of4(sums, words, values, metadata, selector, place, primitive);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

// D = A (16x32, of which two of four are there) * B (32x8) + C (16x8), as mma.sp.m16n8k32 bf16 with float sums.
CHEETAH_PRIMITIVE void mma_2of4_bf16_0(float (&c)[4], uint4 a, uint4 b, uint32_t metadata, CHEETAH_PLACE) {
  mma_2of4_bf16(c, a, b, metadata, 0, place, "mma_2of4_bf16_0");
}

CHEETAH_PRIMITIVE void mma_2of4_bf16_1(float (&c)[4], uint4 a, uint4 b, uint32_t metadata, CHEETAH_PLACE) {
  mma_2of4_bf16(c, a, b, metadata, 1, place, "mma_2of4_bf16_1");
}

// D = A (16x64 signed bytes, of which two of four are there) * B (64x8) + C (16x8), as mma.sp.m16n8k64 s8, which wraps.
CHEETAH_PRIMITIVE void mma_2of4_s8(int32_t (&c)[4], uint4 a, uint4 b, uint32_t metadata, CHEETAH_PLACE) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w}, values[4] = {b.x, b.y, b.z, b.w};
  int32_t sums[4] = {c[0], c[1], c[2], c[3]};
  cheetah_emulator::mma_2of4_bytes(sums, words, values, metadata, place);
  for (int i = 0; i < 4; i++) c[i] = sums[i];
}

CHEETAH_PRIMITIVE uint32_t matrix_transpose_b16(uint32_t value, CHEETAH_PLACE) {
  return cheetah_emulator::matrix_transpose(value, place);
}

CHEETAH_PRIMITIVE void store_matrices_b16(void* row, uint4 words, CHEETAH_PLACE) {
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
  uint32_t* const* rows = cheetah_emulator::rows_of_lanes(row, place, "store_matrices_b16");
  for (uint32_t matrix = 0; matrix < 4; ++matrix)
    rows[matrix][threadIdx.x % 4] = cheetah_emulator::matrix_transpose(parts[matrix], place);
}

CHEETAH_PRIMITIVE uint4 load_matrices_b16(const void* row, CHEETAH_PLACE) {
  uint32_t parts[4];
  uint32_t* const* rows = cheetah_emulator::rows_of_lanes(row, place, "load_matrices_b16");
  for (uint32_t matrix = 0; matrix < 4; ++matrix)
    parts[matrix] = cheetah_emulator::matrix_transpose(rows[matrix][threadIdx.x % 4], place);
  return {parts[0], parts[1], parts[2], parts[3]};
}

CHEETAH_PRIMITIVE uint4 load_rows_b16(const void* row, CHEETAH_PLACE) {
  const uint32_t word = threadIdx.x % 4;
  uint32_t* const* rows = cheetah_emulator::rows_of_lanes(row, place, "load_rows_b16");
  return {rows[0][word], rows[1][word], rows[2][word], rows[3][word]};
}

// -- products of a warpgroup: operands are read, and sums written, at any time until they are waited for

CHEETAH_PRIMITIVE uint64_t matrix_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes,
                                             CHEETAH_PLACE) {
  return cheetah_emulator::matrix_descriptor(start, leading_bytes, stride_bytes, place);
}

CHEETAH_PRIMITIVE void wgmma_fence(CHEETAH_PLACE) { cheetah_emulator::wgmma_fence(place); }
CHEETAH_PRIMITIVE void wgmma_commit(CHEETAH_PLACE) { cheetah_emulator::wgmma_commit(place); }
CHEETAH_PRIMITIVE void wgmma_wait_all(CHEETAH_PLACE) { cheetah_emulator::wgmma_wait(0, place, "wgmma_wait_all"); }

CHEETAH_PRIMITIVE void wgmma_wait_but_one(CHEETAH_PLACE) {
  cheetah_emulator::wgmma_wait(1, place, "wgmma_wait_but_one");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n16(float (&sums)[8], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 16, false, place, "wgmma_bf16_n16");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n32(float (&sums)[16], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 32, false, place, "wgmma_bf16_n32");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n64(float (&sums)[32], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 64, false, place, "wgmma_bf16_n64");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n128(float (&sums)[64], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 128, false, place, "wgmma_bf16_n128");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n160(float (&sums)[80], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 160, false, place, "wgmma_bf16_n160");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n256(float (&sums)[128], const uint4& a, uint64_t b, uint32_t accumulate,
                                       CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 256, false, place, "wgmma_bf16_n256");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n64_transposed(float (&sums)[32], const uint4& a, uint64_t b, uint32_t accumulate,
                                                  CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 64, true, place, "wgmma_bf16_n64_transposed");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n96_transposed(float (&sums)[48], const uint4& a, uint64_t b, uint32_t accumulate,
                                                 CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 96, true, place, "wgmma_bf16_n96_transposed");
}

CHEETAH_PRIMITIVE void wgmma_bf16_n128_transposed(float (&sums)[64], const uint4& a, uint64_t b, uint32_t accumulate,
                                                  CHEETAH_PLACE) {
  cheetah_emulator::wgmma(sums, &a.x, b, accumulate, 128, true, place, "wgmma_bf16_n128_transposed");
}

// -- mbarriers and bulk copies

CHEETAH_PRIMITIVE void mbarrier_init(uint64_t* barrier, uint32_t arrivals, CHEETAH_PLACE) {
  cheetah_emulator::mbarrier_init(barrier, arrivals, place);
}

CHEETAH_PRIMITIVE void mbarrier_fence_init(CHEETAH_PLACE) {
  cheetah_emulator::preemption_point(place, "mbarrier_fence_init");
}

CHEETAH_PRIMITIVE void mbarrier_arrive(uint64_t* barrier, CHEETAH_PLACE) {
  cheetah_emulator::mbarrier_arrive(barrier, 0, place, "mbarrier_arrive");
}

CHEETAH_PRIMITIVE void mbarrier_arrive_many(uint64_t* barrier, uint32_t arrivals, CHEETAH_PLACE) {
  for (uint32_t arrival = 0; arrival < arrivals; ++arrival)
    cheetah_emulator::mbarrier_arrive(barrier, 0, place, "mbarrier_arrive_many");
}

CHEETAH_PRIMITIVE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes, CHEETAH_PLACE) {
  cheetah_emulator::mbarrier_arrive(barrier, bytes, place, "mbarrier_arrive_expect_tx");
}

CHEETAH_PRIMITIVE void mbarrier_wait(uint64_t* barrier, uint32_t parity, CHEETAH_PLACE) {
  cheetah_emulator::mbarrier_wait(barrier, parity, place);
}

CHEETAH_PRIMITIVE void bulk_copy(void* shared_destination, const void* global_source, uint32_t bytes,
                                 uint64_t* barrier, CHEETAH_PLACE) {
  cheetah_emulator::bulk_copy(shared_destination, global_source, bytes, barrier, place);
}

CHEETAH_PRIMITIVE void bulk_copy_shared(void* shared_destination, const void* global_source, uint32_t bytes,
                                        uint64_t* barrier, CHEETAH_PLACE) {
  cheetah_emulator::bulk_copy_shared(shared_destination, global_source, bytes, barrier, place);
}

CHEETAH_PRIMITIVE void fence_proxy_async(CHEETAH_PLACE) { cheetah_emulator::fence_proxy_async(place); }
CHEETAH_PRIMITIVE void fence_proxy_async_global(CHEETAH_PLACE) { cheetah_emulator::fence_proxy_async(place); }
CHEETAH_PRIMITIVE void fence_proxy_async_shared(CHEETAH_PLACE) { (void)place; }

CHEETAH_PRIMITIVE uint32_t renewed_u32(uint32_t value) { return value; }
CHEETAH_PRIMITIVE void give_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void take_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void keep_64_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void keep_104_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void take_192_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void take_200_registers(CHEETAH_PLACE) { (void)place; }
CHEETAH_PRIMITIVE void wait_for_u32(uint32_t, CHEETAH_PLACE) { cheetah_emulator::loads_have_read(place); }

CHEETAH_PRIMITIVE void prefetch_l2(const void* place_of_line, CHEETAH_PLACE) {
  cheetah_emulator::check_global(place_of_line, 1, 1, place, "prefetch_l2");
}

// -- words that cross blocks. The __atomic builtins stand here, in instrumented text, with the order the kernel asked
// for: the race detector then learns of exactly the synchronisation that the GPU would give.

CHEETAH_PRIMITIVE void publish_flagged(uint64_t* p, uint32_t data, uint32_t epoch, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 8, 8, place, "publish_flagged");
  __atomic_store_n(p, uint64_t(epoch) << 32 | data, __ATOMIC_RELAXED);
  cheetah_emulator::words_written(p);
}

CHEETAH_PRIMITIVE void publish_flagged_release(uint64_t* p, uint32_t data, uint32_t epoch, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 8, 8, place, "publish_flagged_release");
  __atomic_store_n(p, uint64_t(epoch) << 32 | data, __ATOMIC_RELEASE);
  cheetah_emulator::words_written(p);
}

namespace cheetah_emulator {

template <int order>
CHEETAH_INLINE uint4 wait_flagged4(const uint64_t* p, uint32_t epoch, Place place, const char* primitive) {
  begin_word_wait(p, 8, place, primitive);
  for (;;) {
    const uint64_t w0 = __atomic_load_n(p, order), w1 = __atomic_load_n(p + 1, order);
    const uint64_t w2 = __atomic_load_n(p + 2, order), w3 = __atomic_load_n(p + 3, order);
    if (w0 >> 32 == epoch && w1 >> 32 == epoch && w2 >> 32 == epoch && w3 >> 32 == epoch)
      return {uint32_t(w0), uint32_t(w1), uint32_t(w2), uint32_t(w3)};
    wait_for_flags(p, epoch, place, primitive);
  }
}

}  // namespace cheetah_emulator

CHEETAH_PRIMITIVE uint4 wait_flagged4(const uint64_t* p, uint32_t epoch, CHEETAH_PLACE) {
  return cheetah_emulator::wait_flagged4<__ATOMIC_RELAXED>(p, epoch, place, "wait_flagged4");
}

CHEETAH_PRIMITIVE void ask_flagged4(uint64_t (&asked)[4], const uint64_t* p, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 32, 16, place, "ask_flagged4");
  for (uint32_t i = 0; i < 4; i++) asked[i] = __atomic_load_n(p + i, __ATOMIC_RELAXED);
}

CHEETAH_PRIMITIVE uint4 settle_flagged4(const uint64_t (&asked)[4], const uint64_t* p, uint32_t epoch, CHEETAH_PLACE) {
  bool is_there = true;
  for (uint64_t word : asked) is_there &= word >> 32 == epoch;
  if (is_there) return {uint32_t(asked[0]), uint32_t(asked[1]), uint32_t(asked[2]), uint32_t(asked[3])};
  return cheetah_emulator::wait_flagged4<__ATOMIC_RELAXED>(p, epoch, place, "settle_flagged4");
}

CHEETAH_PRIMITIVE void wait_flagged_units(uint4 (&data)[8], const uint64_t* words, uint32_t stride, uint32_t count,
                                          uint32_t epoch, CHEETAH_PLACE) {
  for (uint32_t i = 0; i < count && i < 8; i++)
    data[i] = cheetah_emulator::wait_flagged4<__ATOMIC_RELAXED>(words + i * stride, epoch, place, "wait_flagged_units");
}

CHEETAH_PRIMITIVE void wait_flagged_places(uint4 (&data)[8], const uint64_t* words, const uint32_t (&offsets)[8],
                                           uint32_t count, uint32_t epoch, CHEETAH_PLACE) {
  for (uint32_t i = 0; i < count && i < 8; i++)
    data[i] =
        cheetah_emulator::wait_flagged4<__ATOMIC_RELAXED>(words + offsets[i], epoch, place, "wait_flagged_places");
}

CHEETAH_PRIMITIVE uint4 wait_flagged4_acquire(const uint64_t* p, uint32_t epoch, CHEETAH_PLACE) {
  return cheetah_emulator::wait_flagged4<__ATOMIC_ACQUIRE>(p, epoch, place, "wait_flagged4_acquire");
}

CHEETAH_PRIMITIVE void add_release_u64(uint64_t* p, uint64_t value, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 8, 8, place, "add_release_u64");
  __atomic_fetch_add(p, value, __ATOMIC_RELEASE);
  cheetah_emulator::words_written(p);
}

CHEETAH_PRIMITIVE uint64_t fetch_add_release_u64(uint64_t* p, uint64_t value, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 8, 8, place, "fetch_add_release_u64");
  const uint64_t before = __atomic_fetch_add(p, value, __ATOMIC_RELEASE);
  cheetah_emulator::words_written(p);
  return before;
}

CHEETAH_PRIMITIVE void wait_at_least_u64(const uint64_t* p, uint64_t value, CHEETAH_PLACE) {
  cheetah_emulator::begin_counter_wait(p, place, "wait_at_least_u64");
  while (__atomic_load_n(p, __ATOMIC_ACQUIRE) < value) cheetah_emulator::wait_for_at_least(p, value, place);
}

CHEETAH_PRIMITIVE void store_relaxed_u32(uint32_t* p, uint32_t value, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 4, 4, place, "store_relaxed_u32");
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

CHEETAH_PRIMITIVE uint32_t load_relaxed_u32(const uint32_t* p, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 4, 4, place, "load_relaxed_u32");
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

// -- a word of shared memory that orders nothing

CHEETAH_PRIMITIVE void store_shared_u32(uint32_t* p, uint32_t value, CHEETAH_PLACE) {
  (void)place;
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

CHEETAH_PRIMITIVE uint32_t load_shared_u32(const uint32_t* p, CHEETAH_PLACE) {
  (void)place;
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

// -- the same for the whole system, of which several GPUs (ranks) are parts: stores to another rank's memory land later

namespace cheetah_emulator {

struct SystemScope {
  SystemScope() { enter_system_scope(); }
  ~SystemScope() { leave_system_scope(); }
};

}  // namespace cheetah_emulator

CHEETAH_PRIMITIVE void publish_flagged_sys(uint64_t* p, uint32_t data, uint32_t epoch, CHEETAH_PLACE) {
  const uint64_t word = uint64_t(epoch) << 32 | data;
  if (!cheetah_emulator::store_to_peer(p, word, 8, epoch, false, place, "publish_flagged_sys"))
    publish_flagged(p, data, epoch, place);
}

CHEETAH_PRIMITIVE void publish_flagged_release_sys(uint64_t* p, uint32_t data, uint32_t epoch, CHEETAH_PLACE) {
  const uint64_t word = uint64_t(epoch) << 32 | data;
  if (!cheetah_emulator::store_to_peer(p, word, 8, epoch, true, place, "publish_flagged_release_sys"))
    publish_flagged_release(p, data, epoch, place);
}

#define CHEETAH_IN_SYSTEM_SCOPE(call) const cheetah_emulator::SystemScope scope; return call

CHEETAH_PRIMITIVE void ask_flagged4_sys(uint64_t (&asked)[4], const uint64_t* p, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(ask_flagged4(asked, p, place));
}

CHEETAH_PRIMITIVE uint4 settle_flagged4_sys(const uint64_t (&asked)[4], const uint64_t* p, uint32_t epoch,
                                            CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(settle_flagged4(asked, p, epoch, place));
}

CHEETAH_PRIMITIVE uint4 wait_flagged4_sys(const uint64_t* p, uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_flagged4(p, epoch, place));
}

CHEETAH_PRIMITIVE void wait_flagged_units_sys(uint4 (&data)[8], const uint64_t* words, uint32_t stride, uint32_t count,
                                              uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_flagged_units(data, words, stride, count, epoch, place));
}

CHEETAH_PRIMITIVE void wait_flagged_places_sys(uint4 (&data)[8], const uint64_t* words, const uint32_t (&offsets)[8],
                                               uint32_t count, uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_flagged_places(data, words, offsets, count, epoch, place));
}

CHEETAH_PRIMITIVE uint4 wait_flagged4_acquire_sys(const uint64_t* p, uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_flagged4_acquire(p, epoch, place));
}

CHEETAH_PRIMITIVE void add_release_u64_sys(uint64_t* p, uint64_t value, CHEETAH_PLACE) {
  if (!cheetah_emulator::add_to_peer(p, value, place, "add_release_u64_sys")) add_release_u64(p, value, place);
}

CHEETAH_PRIMITIVE void wait_at_least_u64_sys(const uint64_t* p, uint64_t value, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_at_least_u64(p, value, place));
}

CHEETAH_PRIMITIVE void store_to_peer_u16(uint16_t* p, uint16_t value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 2, place, "store_to_peer_u16");
}

CHEETAH_PRIMITIVE void store_to_peer_u32(uint32_t* p, uint32_t value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 4, place, "store_to_peer_u32");
}

CHEETAH_PRIMITIVE void store_to_peer_u32x2(uint2* p, uint2 value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 8, place, "store_to_peer_u32x2");
}

CHEETAH_PRIMITIVE void store_to_peer_u32x4(uint4* p, uint4 value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 16, place, "store_to_peer_u32x4");
}

CHEETAH_PRIMITIVE void store_to_peer_f32(float* p, float value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 4, place, "store_to_peer_f32");
}

CHEETAH_PRIMITIVE void store_to_peer_bf16(bf16* p, bf16 value, CHEETAH_PLACE) {
  cheetah_emulator::data_to_peer(p, &value, 2, place, "store_to_peer_bf16");
}

#define fetch_add_release_u64_sys fetch_add_release_u64
#define store_relaxed_u32_sys store_relaxed_u32
#define load_relaxed_u32_sys load_relaxed_u32

// -- memory that nobody writes during the launch

CHEETAH_PRIMITIVE uint4 load_constant_u32x4(const void* p, CHEETAH_PLACE) {
  cheetah_emulator::check_constant(p, 16, place, "load_constant_u32x4");
  return *static_cast<const uint4*>(p);
}


CHEETAH_PRIMITIVE uint32_t load_constant_u32(const void* p, CHEETAH_PLACE) {
  cheetah_emulator::check_constant(p, 4, place, "load_constant_u32");
  return *static_cast<const uint32_t*>(p);
}

// -- arithmetic

// prmt.b32 in its default mode: each nibble of the selector picks a byte of {b, a}; its top bit spreads the sign.
CHEETAH_PRIMITIVE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t pick = selector >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (pick & 7)) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

CHEETAH_PRIMITIVE uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return byte_permute(a, b, selector);
}

CHEETAH_PRIMITIVE uint4 make_u32x4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// fmaxf: the other operand if one is NaN.
CHEETAH_PRIMITIVE float maximum_f32(float a, float b) { return __builtin_fmaxf(a, b); }

// An address for inline PTX, which the emulator cannot run.
CHEETAH_PRIMITIVE uint32_t shared_address(const void* pointer) { return uint32_t(reinterpret_cast<uintptr_t>(pointer)); }

CHEETAH_PRIMITIVE float bf16_to_f32(bf16 value) { return bits_float(uint32_t(value.bits) << 16); }

// Nearest even; every NaN becomes 0x7FFF, as cvt.rn.bf16.f32 gives it.
CHEETAH_PRIMITIVE bf16 f32_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FFF};
  return {uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16)};
}

CHEETAH_PRIMITIVE uint32_t pack_bf16x2(float low, float high) {
  return uint32_t(f32_to_bf16(high).bits) << 16 | f32_to_bf16(low).bits;
}

CHEETAH_PRIMITIVE float bf16x2_low(uint32_t value) { return bits_float(value << 16); }

CHEETAH_PRIMITIVE float bf16x2_high(uint32_t value) { return bits_float(value & 0xFFFF0000u); }

CHEETAH_PRIMITIVE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(bf16x2_low(a) * bf16x2_low(b), bf16x2_high(a) * bf16x2_high(b));
}

CHEETAH_PRIMITIVE uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(bf16x2_low(a) - bf16x2_low(b), bf16x2_high(a) - bf16x2_high(b));
}

// -- words that cross blocks with a tag in the bits that two small bf16 numbers leave free

namespace cheetah_emulator {

CHEETAH_INLINE uint32_t tag_of(uint32_t epoch) {
  const uint32_t number = epoch % 3 + 1;
  return (number & 1) << 14 | (number & 2) << 29;
}

CHEETAH_INLINE uint32_t power_of_two_bf16x2(uint32_t exponent) { return ((127 + exponent) << 7) * 0x00010001; }

}  // namespace cheetah_emulator

namespace cheetah_emulator {

inline uint32_t tagged_word(uint32_t data, uint32_t exponent, uint32_t epoch) {
  const uint32_t small = multiply_bf16x2(data, power_of_two_bf16x2(-exponent));
  const uint32_t too_large = (small >> 14 & 0x00010001) * 0xFFFF;
  return (small & ~too_large) | (too_large & 0x3FFF3FFF) | tag_of(epoch);
}

}  // namespace cheetah_emulator

CHEETAH_PRIMITIVE void publish_tagged(uint32_t* p, uint32_t data, uint32_t exponent, uint32_t epoch, CHEETAH_PLACE) {
  cheetah_emulator::check_global(p, 4, 4, place, "publish_tagged");
  __atomic_store_n(p, cheetah_emulator::tagged_word(data, exponent, epoch), __ATOMIC_RELAXED);
  cheetah_emulator::tagged(p, epoch);
  cheetah_emulator::words_written(p);
}

namespace cheetah_emulator {

CHEETAH_INLINE uint4 wait_tagged4(const uint32_t* p, uint32_t exponent, uint32_t epoch, Place place,
                                  const char* primitive) {
  const uint32_t tag = tag_of(epoch), factor = power_of_two_bf16x2(exponent);
  begin_word_wait(p, 4, place, primitive);
  for (;;) {
    uint32_t words[4], missing = 0;
    for (uint32_t i = 0; i < 4; i++) missing |= words[i] = __atomic_load_n(p + i, __ATOMIC_RELAXED) ^ tag;
    if (!(missing & tag_bits)) {
      check_epochs(p, epoch, place, primitive);
      return {multiply_bf16x2(words[0], factor), multiply_bf16x2(words[1], factor),
              multiply_bf16x2(words[2], factor), multiply_bf16x2(words[3], factor)};
    }
    wait_for_tags(p, tag, place, primitive);
  }
}

}  // namespace cheetah_emulator

CHEETAH_PRIMITIVE uint4 wait_tagged4(const uint32_t* p, uint32_t exponent, uint32_t epoch, CHEETAH_PLACE) {
  return cheetah_emulator::wait_tagged4(p, exponent, epoch, place, "wait_tagged4");
}

CHEETAH_PRIMITIVE void wait_tagged_units(uint4 (&data)[8], const uint32_t* words, uint32_t stride, uint32_t count,
                                         uint32_t exponent, uint32_t epoch, CHEETAH_PLACE) {
  for (uint32_t i = 0; i < count && i < 8; i++)
    data[i] = cheetah_emulator::wait_tagged4(words + i * stride, exponent, epoch, place, "wait_tagged_units");
}

CHEETAH_PRIMITIVE void publish_tagged_sys(uint32_t* p, uint32_t data, uint32_t exponent, uint32_t epoch,
                                          CHEETAH_PLACE) {
  const uint32_t word = cheetah_emulator::tagged_word(data, exponent, epoch);
  if (!cheetah_emulator::store_to_peer(p, word, 4, epoch, false, place, "publish_tagged_sys"))
    publish_tagged(p, data, exponent, epoch, place);
}

CHEETAH_PRIMITIVE uint4 wait_tagged4_sys(const uint32_t* p, uint32_t exponent, uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_tagged4(p, exponent, epoch, place));
}

CHEETAH_PRIMITIVE void wait_tagged_units_sys(uint4 (&data)[8], const uint32_t* words, uint32_t stride, uint32_t count,
                                             uint32_t exponent, uint32_t epoch, CHEETAH_PLACE) {
  CHEETAH_IN_SYSTEM_SCOPE(wait_tagged_units(data, words, stride, count, exponent, epoch, place));
}

namespace cheetah_emulator {

// Sign, four bits of exponent (bias 7), three of mantissa; the code with all bits set, NaN, gives 480 as on the GPU.
CHEETAH_INLINE uint32_t bf16_of_e4m3(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? __builtin_ldexpf(8.0f + mantissa, exponent - 10) : __builtin_ldexpf(float(mantissa), -9);
  return float_bits(code & 128 ? -size : size) >> 16;
}

// Sign, five bits of exponent (bias 15), ten of mantissa.
CHEETAH_INLINE float f32_of_f16(uint32_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent == 31 ? bits_float(0x7F800000u | mantissa << 13)
                     : exponent     ? __builtin_ldexpf(1024.0f + mantissa, exponent - 25)
                                    : __builtin_ldexpf(float(mantissa), -24);
  return bits & 0x8000 ? -size : size;
}

// Nearest even; what is too large becomes infinite.
__forceinline__ uint32_t f16_of_f32(float value) {
  const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000;
  const float size = bits_float(bits & 0x7FFFFFFFu);
  if (size != size) return 0x7FFF;
  if (size >= 65520.0f) return sign | 0x7C00;
  // 1024 of these is the first normal number.
  if (size < 0x1p-14f) return sign | uint32_t(__builtin_nearbyintf(size * 0x1p24f));
  return sign | (((float_bits(size) + 0xFFFu + (float_bits(size) >> 13 & 1)) >> 13) - ((127 - 15) << 10));
}

__forceinline__ uint32_t f16_of_e4m3(uint32_t code) {
  return (code & 127) == 127 ? 0x7FFF : f16_of_f32(bits_float(bf16_of_e4m3(code) << 16));
}

// Nearest even, saturating; NaN stays NaN (0x7F).
CHEETAH_INLINE uint32_t e4m3_of_f32(float value) {
  const uint32_t bits = float_bits(value), sign = bits >> 24 & 128;
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7F;
  const float size = bits_float(bits & 0x7FFFFFFFu);
  if (size >= 448.0f) return sign | 0x7E;
  // 8 of these is the first normal number.
  if (size < 0x1p-6f) return sign | uint32_t(__builtin_nearbyintf(size * 512.0f));
  const uint32_t code = ((float_bits(size) + 0x7FFFFu + (float_bits(size) >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  return sign | (code > 0x7E ? 0x7E : code);
}

}  // namespace cheetah_emulator

CHEETAH_PRIMITIVE uint32_t pack_f16x2(float low, float high) {
  return cheetah_emulator::f16_of_f32(low) | cheetah_emulator::f16_of_f32(high) << 16;
}

CHEETAH_PRIMITIVE uint2 e4m3x4_to_f16(uint32_t codes) {
  using namespace cheetah_emulator;
  return {f16_of_e4m3(codes & 255) | f16_of_e4m3(codes >> 8 & 255) << 16,
          f16_of_e4m3(codes >> 16 & 255) | f16_of_e4m3(codes >> 24) << 16};
}

CHEETAH_PRIMITIVE float f16x2_low(uint32_t pair) { return cheetah_emulator::f32_of_f16(pair & 0xFFFFu); }

CHEETAH_PRIMITIVE float f16x2_high(uint32_t pair) { return cheetah_emulator::f32_of_f16(pair >> 16); }

CHEETAH_PRIMITIVE uint2 e4m3x4_to_bf16(uint32_t codes) {
  return {cheetah_emulator::bf16_of_e4m3(codes & 255) | cheetah_emulator::bf16_of_e4m3(codes >> 8 & 255) << 16,
          cheetah_emulator::bf16_of_e4m3(codes >> 16 & 255) | cheetah_emulator::bf16_of_e4m3(codes >> 24) << 16};
}

CHEETAH_PRIMITIVE uint32_t e4m3x2_from_f32(float low, float high) {
  return cheetah_emulator::e4m3_of_f32(low) | cheetah_emulator::e4m3_of_f32(high) << 8;
}

CHEETAH_PRIMITIVE float tanh_f32(float value) { return __builtin_tanhf(value); }
CHEETAH_PRIMITIVE float exp2_f32(float value) { return __builtin_exp2f(value); }
CHEETAH_PRIMITIVE float exp_f32(float value) { return __builtin_expf(value); }
CHEETAH_PRIMITIVE float log_f32(float value) { return __builtin_logf(value); }
CHEETAH_PRIMITIVE float rsqrt_f32(float value) { return 1.0f / __builtin_sqrtf(value); }
CHEETAH_PRIMITIVE float divide_f32(float a, float b) { return a / b; }
CHEETAH_PRIMITIVE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

CHEETAH_PRIMITIVE uint32_t multiplied_u32(uint32_t word, uint32_t factor) { return word * factor; }
CHEETAH_PRIMITIVE uint32_t maximum_u16x2(uint32_t a, uint32_t b) {
  const uint32_t high = a >> 16 > b >> 16 ? a : b, low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
}
CHEETAH_PRIMITIVE uint32_t select_bits_u32(uint32_t mask, uint32_t word, uint32_t others) {
  return (word & mask) | (others & ~mask);
}

CHEETAH_PRIMITIVE uint32_t population_u32(uint32_t word) { return uint32_t(__builtin_popcount(word)); }

CHEETAH_PRIMITIVE uint32_t multiply_high_u32(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }

// Nanoseconds that only grow; counted from switches, so that a launch is a function of its inputs and seed.
CHEETAH_PRIMITIVE uint64_t global_timer() { return cheetah_emulator::virtual_nanoseconds(); }

#undef CHEETAH_IN_SYSTEM_SCOPE
#undef CHEETAH_PLACE
#undef CHEETAH_PRIMITIVE
