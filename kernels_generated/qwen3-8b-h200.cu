// The whole decode step of a Qwen3 model in one persistent kernel. Generated; do not edit.
// Regenerate with: cheetah generate qwen3-8b
//
// model: hidden 4096, ffn 12288, vocab 151936, heads 32, kv_heads 8, head_dim 128, layers 36
// machine: h200, 132 blocks of 384 threads: 8 math warps
// plan: math_warps 8, stage_bytes 16384, stages 12, in_flight 4, copy_warps 4, sync flags, page_size 16, max_context 8192, batch 1, tokens 1, down_slices 2, max_steps 64, kv_align 16, kv_chunk_min 256, kv_chunk 0, kv_item_cost 128, kv_dtype bf16, start_qkv 8, start_residual 0, start_gate_up 8, start_head 8, trace False
// weights read a step: 15136194560 bytes, in 385875968 a layer
// shared memory:
//     offset    bytes  region
//          0   196608  ring
//     196608      192  ring_barriers
//     196864    26624  scratch
//     196864    12288  vector  (over scratch)
//     196864     2112  candidates  (over scratch)
//     196864    16384  attention  (over scratch)
//     213248     2048  queries  (over scratch)
//     215296     8192  newest  (over scratch)
//     223488     1024  reductions
//     224512      128  residual
//     224640      256  partial_sums
//     224896        4  scales
//     224912      512  rope
//     225424      512  statistics
//     225936      592  records
//     226528       64  warp_candidates
//     226592       32  columns
//     226624        4  chosen
//     226640       16  step_done
//     226656        8  next_token
//              226664  total
//              232448  a block has, 5784 free

#ifdef CHEETAH_EMULATOR
#include "cheetah_emulator.h"
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef int int32_t;
typedef long int64_t;
struct bf16 { uint16_t bits; };

__device__ __forceinline__ uint8_t* shared_arena() {
  extern __shared__ __align__(1024) uint8_t cheetah_shared_memory[];
  return cheetah_shared_memory;
}

__device__ __forceinline__ void block_barrier() {
  __syncthreads();
}

__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}

__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}

__device__ __forceinline__ void wait_for_u32(uint32_t value) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fc0dead; @p nanosleep.u32 1;}" :: "r"(value) : "memory");
}

__device__ __forceinline__ void warp_barrier() {
  __syncwarp();
}

__device__ __forceinline__ float shuffle_xor_f32(float value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t shuffle_xor_u32(uint32_t value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t shuffle_u32(uint32_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
    :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_many(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
    :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
    "{\n\t.reg .pred done;\n\t"
    "again:\n\t"
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
    "@!done bra again;\n\t}"
    :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_copy(void* destination, const void* source, uint32_t bytes, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1], %2, [%3], %4;"
    :: "r"(shared_address(destination)), "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
    : "memory");
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(place) : "memory");
}

__device__ __forceinline__ void publish_flagged(uint64_t* place, uint32_t data, uint32_t epoch) {
  uint64_t word = (uint64_t)epoch << 32 | data;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
}

__device__ __forceinline__ void publish_flagged_release(uint64_t* place, uint32_t data, uint32_t epoch) {
  uint64_t word = (uint64_t)epoch << 32 | data;
  asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
}

__device__ __forceinline__ uint4 wait_flagged4(const uint64_t* words, uint32_t epoch) {
  uint64_t a, b, c, d;
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "l"(words + 2) : "memory");
  } while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch ||
           (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
  return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
}

__device__ __forceinline__ void wait_flagged_units(uint4 (&data)[8], const uint64_t* words, uint32_t stride, uint32_t count, uint32_t epoch) {
  uint64_t word[8][4];
  bool missing;
  do {
    missing = false;
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        const uint64_t* place = words + i * stride;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][0]), "=l"(word[i][1]) : "l"(place) : "memory");
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][2]), "=l"(word[i][3]) : "l"(place + 2) : "memory");
      }
    }
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        #pragma unroll
        for (uint32_t j = 0; j < 4; ++j) missing |= (uint32_t)(word[i][j] >> 32) != epoch;
        data[i] = make_uint4((uint32_t)word[i][0], (uint32_t)word[i][1], (uint32_t)word[i][2], (uint32_t)word[i][3]);
      }
    }
  } while (missing);
}

__device__ __forceinline__ void wait_flagged_places(uint4 (&data)[8], const uint64_t* words, uint32_t (&offsets)[8], uint32_t count, uint32_t epoch) {
  uint64_t word[8][4];
  bool missing;
  do {
    missing = false;
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        const uint64_t* place = words + offsets[i];
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][0]), "=l"(word[i][1]) : "l"(place) : "memory");
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][2]), "=l"(word[i][3]) : "l"(place + 2) : "memory");
      }
    }
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        #pragma unroll
        for (uint32_t j = 0; j < 4; ++j) missing |= (uint32_t)(word[i][j] >> 32) != epoch;
        data[i] = make_uint4((uint32_t)word[i][0], (uint32_t)word[i][1], (uint32_t)word[i][2], (uint32_t)word[i][3]);
      }
    }
  } while (missing);
}

__device__ __forceinline__ uint4 wait_flagged4_acquire(const uint64_t* words, uint32_t epoch) {
  uint64_t a, b, c, d;
  do {
    asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
    asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "l"(words + 2) : "memory");
  } while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch ||
           (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
  return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
}

__device__ __forceinline__ void store_relaxed_u32(uint32_t* place, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_constant_u32(const void* place) {
  uint32_t result;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(result) : "l"(place));
  return result;
}

__device__ __forceinline__ uint4 load_constant_u32x4(const void* place) {
  uint4 result;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
    : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "l"(place));
  return result;
}

__device__ __forceinline__ uint32_t float_bits(float value) {
  return __float_as_uint(value);
}

__device__ __forceinline__ float bits_float(uint32_t bits) {
  return __uint_as_float(bits);
}

__device__ __forceinline__ float bf16_to_f32(bf16 value) {
  return __uint_as_float((uint32_t)value.bits << 16);
}

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ float bf16x2_low(uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float bf16x2_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

__device__ __forceinline__ uint32_t multiply_high_u32(uint32_t a, uint32_t b) {
  return __umulhi(a, b);
}

__device__ __forceinline__ float exp2_f32(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float exp_f32(float value) {
  return __expf(value);
}

__device__ __forceinline__ float log_f32(float value) {
  return logf(value);
}

__device__ __forceinline__ float rsqrt_f32(float value) {
  return rsqrtf(value);
}

__device__ __forceinline__ float divide_f32(float a, float b) {
  return __fdividef(a, b);
}

__device__ __forceinline__ float maximum_f32(float a, float b) {
  return fmaxf(a, b);
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t matrix_transpose_b16(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ uint4 make_u32x4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return make_uint4(x, y, z, w);
}
#endif

constexpr uint32_t RING = 0;
constexpr uint32_t RING_BARRIERS = 196608;
constexpr uint32_t VECTOR = 196864;
constexpr uint32_t CANDIDATES = 196864;
constexpr uint32_t ATTENTION = 196864;
constexpr uint32_t QUERIES = 213248;
constexpr uint32_t NEWEST = 215296;
constexpr uint32_t REDUCTIONS = 223488;
constexpr uint32_t RESIDUAL = 224512;
constexpr uint32_t PARTIAL_SUMS = 224640;
constexpr uint32_t SCALES = 224896;
constexpr uint32_t ROPE = 224912;
constexpr uint32_t STATISTICS = 225424;
constexpr uint32_t RECORDS = 225936;
constexpr uint32_t WARP_CANDIDATES = 226528;
constexpr uint32_t COLUMNS = 226592;
constexpr uint32_t CHOSEN = 226624;
constexpr uint32_t STEP_DONE = 226640;
constexpr uint32_t NEXT_TOKEN = 226656;

// input norm, q, k and v of these tokens, rotary embedding
__device__ __forceinline__ void qkv(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step, uint32_t layer,
    const bf16* norms, const bf16* head_norms, uint8_t* arena, const bf16* embedding, uint32_t* next_token,
    uint32_t lane, uint32_t warp, uint32_t column_count, uint64_t* exchange_words, uint32_t layer_epoch, uint64_t* full,
    uint32_t& use_stage, uint32_t& use_parity, uint8_t* ring, uint64_t* empty, uint32_t& turn, uint32_t& finisher) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + layer * 5);
  }
  const uint8_t* lines = (const uint8_t*)(norms + (layer * 2 + 1) * 4096);
  if (thread == 0) {
    #pragma unroll 1
    for (uint32_t offset = block * 128; offset < 8192; offset += 16896) {
      prefetch_l2(lines + offset);
    }
  }
  const uint8_t* lines_2 = (const uint8_t*)(head_norms + layer * 256);
  if (thread == 0) {
    #pragma unroll 1
    for (uint32_t offset = block * 128; offset < 512; offset += 16896) {
      prefetch_l2(lines_2 + offset);
    }
  }
  uint32_t position = (block + 8) % 132;
  if (position < 384) {
    if (layer == 0) {
      uint4* vector = (uint4*)(arena + VECTOR);
      float squares = 0.0f;
      uint32_t first_unit = thread;
      uint4 weights[8];
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        uint4 value = load_constant_u32x4(norms + (first_unit + number * 256) * 8);
        weights[number] = value;
      }
      uint4 units[8];
      const bf16* embedded = embedding + (uint64_t)(next_token[0]) * 4096;
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        uint4 value = load_constant_u32x4(embedded + (first_unit + number * 256) * 8);
        units[number] = value;
      }
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        float low = bf16x2_low(units[number].x);
        float high = bf16x2_high(units[number].x);
        squares = squares + (low * low + high * high);
        uint32_t weights_2 = weights[number].x;
        float low_2 = bf16x2_low(units[number].y);
        float high_2 = bf16x2_high(units[number].y);
        squares = squares + (low_2 * low_2 + high_2 * high_2);
        uint32_t weights_3 = weights[number].y;
        float low_3 = bf16x2_low(units[number].z);
        float high_3 = bf16x2_high(units[number].z);
        squares = squares + (low_3 * low_3 + high_3 * high_3);
        uint32_t weights_4 = weights[number].z;
        float low_4 = bf16x2_low(units[number].w);
        float high_4 = bf16x2_high(units[number].w);
        squares = squares + (low_4 * low_4 + high_4 * high_4);
        uint32_t weights_5 = weights[number].w;
        vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_2), high * bf16x2_high(weights_2)), pack_bf16x2(low_2 * bf16x2_low(weights_3), high_2 * bf16x2_high(weights_3)), pack_bf16x2(low_3 * bf16x2_low(weights_4), high_3 * bf16x2_high(weights_4)), pack_bf16x2(low_4 * bf16x2_low(weights_5), high_4 * bf16x2_high(weights_5)));
      }
      float* partial_sums = (float*)(arena + PARTIAL_SUMS);
      float* scales = (float*)(arena + SCALES);
      float sum_of_token = squares;
      float value = shuffle_xor_f32(sum_of_token, 16);
      sum_of_token = sum_of_token + value;
      float value_2 = shuffle_xor_f32(sum_of_token, 8);
      sum_of_token = sum_of_token + value_2;
      float value_3 = shuffle_xor_f32(sum_of_token, 4);
      sum_of_token = sum_of_token + value_3;
      float value_4 = shuffle_xor_f32(sum_of_token, 2);
      sum_of_token = sum_of_token + value_4;
      float value_5 = shuffle_xor_f32(sum_of_token, 1);
      sum_of_token = sum_of_token + value_5;
      if (lane % 4 == 0 && lane < 4) {
        partial_sums[warp * 8 + lane / 4] = sum_of_token;
      }
      named_barrier(1, 256);
      if (thread < column_count) {
        float total = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 8; ++other) {
          uint32_t warp_2 = other + thread / 8;
          total = total + partial_sums[warp_2 * 8 + thread % 8];
        }
        scales[thread] = rsqrt_f32(total * 0.000244140625f + 1e-06f);
      }
    } else {
      uint4* vector = (uint4*)(arena + VECTOR);
      float squares = 0.0f;
      uint32_t first_unit = thread;
      uint4 weights[8];
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        uint4 value = load_constant_u32x4(norms + layer * 2 * 4096 + (first_unit + number * 256) * 8);
        weights[number] = value;
      }
      if (lane == 0) {
        uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 32), layer_epoch - 1);
      }
      warp_barrier();
      uint4 units[8];
      wait_flagged_units(units, exchange_words + (first_unit * 4 + 32), 1024, 2, layer_epoch - 1);
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        float low = bf16x2_low(units[number].x);
        float high = bf16x2_high(units[number].x);
        squares = squares + (low * low + high * high);
        uint32_t weights_2 = weights[number].x;
        float low_2 = bf16x2_low(units[number].y);
        float high_2 = bf16x2_high(units[number].y);
        squares = squares + (low_2 * low_2 + high_2 * high_2);
        uint32_t weights_3 = weights[number].y;
        float low_3 = bf16x2_low(units[number].z);
        float high_3 = bf16x2_high(units[number].z);
        squares = squares + (low_3 * low_3 + high_3 * high_3);
        uint32_t weights_4 = weights[number].z;
        float low_4 = bf16x2_low(units[number].w);
        float high_4 = bf16x2_high(units[number].w);
        squares = squares + (low_4 * low_4 + high_4 * high_4);
        uint32_t weights_5 = weights[number].w;
        vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_2), high * bf16x2_high(weights_2)), pack_bf16x2(low_2 * bf16x2_low(weights_3), high_2 * bf16x2_high(weights_3)), pack_bf16x2(low_3 * bf16x2_low(weights_4), high_3 * bf16x2_high(weights_4)), pack_bf16x2(low_4 * bf16x2_low(weights_5), high_4 * bf16x2_high(weights_5)));
      }
      float* partial_sums = (float*)(arena + PARTIAL_SUMS);
      float* scales = (float*)(arena + SCALES);
      float sum_of_token = squares;
      float value = shuffle_xor_f32(sum_of_token, 16);
      sum_of_token = sum_of_token + value;
      float value_2 = shuffle_xor_f32(sum_of_token, 8);
      sum_of_token = sum_of_token + value_2;
      float value_3 = shuffle_xor_f32(sum_of_token, 4);
      sum_of_token = sum_of_token + value_3;
      float value_4 = shuffle_xor_f32(sum_of_token, 2);
      sum_of_token = sum_of_token + value_4;
      float value_5 = shuffle_xor_f32(sum_of_token, 1);
      sum_of_token = sum_of_token + value_5;
      if (lane % 4 == 0 && lane < 4) {
        partial_sums[warp * 8 + lane / 4] = sum_of_token;
      }
      named_barrier(1, 256);
      if (thread < column_count) {
        float total = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 8; ++other) {
          uint32_t warp_2 = other + thread / 8;
          total = total + partial_sums[warp_2 * 8 + thread % 8];
        }
        scales[thread] = rsqrt_f32(total * 0.000244140625f + 1e-06f);
      }
    }
    #pragma unroll 1
    for (uint32_t strip = position; strip < 384; strip += 132) {
      float sums[1][4] = {};
      #pragma unroll 2
      for (uint32_t chunk = 0; chunk < 8; ++chunk) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk_2 = ring + use_stage * 16384;
        uint4* vector = (uint4*)(arena + VECTOR);
        const uint4* fragments = (const uint4*)(chunk_2);
        #pragma unroll
        for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
          uint32_t pair = turn_2 * 8 + warp;
          uint4 first = fragments[pair * 64 + lane];
          uint4 second = fragments[pair * 64 + 32 + lane];
          uint4* units = vector + (chunk * 16 + pair) * 4;
          uint4 values = units[lane % 4];
          mma_bf16(sums[0], first, values.x, values.y);
          mma_bf16(sums[0], second, values.z, values.w);
          wait_for_u32(first.x ^ second.x);
        }
        warp_barrier();
        if (lane == 0) {
          mbarrier_arrive(empty + use_stage);
        }
        use_stage = use_stage + 1;
        if (use_stage == 12) {
          use_stage = 0;
          use_parity = use_parity ^ 1;
        }
      }
      float* reductions = (float*)(arena + REDUCTIONS) + turn * 128;
      uint32_t row = warp * 16 + lane / 4;
      uint32_t first = lane % 4 * 2;
      if (first < 1) {
        uint32_t place = row + first;
        reductions[place] = sums[0][0];
        reductions[place + 8] = sums[0][2];
      }
      named_barrier(1, 256);
      if (warp == finisher) {
        uint32_t column = 0;
        uint32_t row_2 = lane % 16;
        uint32_t half = lane / 16;
        float half_sum = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 4; ++other) {
          uint32_t place = (half * 4 + other) * 16 + row_2;
          half_sum = half_sum + reductions[place + column];
        }
        float value = shuffle_xor_f32(half_sum, 16);
        float row_sum = half_sum + value;
        uint32_t head = strip / 8;
        uint32_t strip_of_head = strip % 8;
        float value_2 = row_sum * ((float*)(arena + SCALES))[column];
        uint32_t paired = strip_of_head * 8 + row_2 % 8 + (row_2 >= 8 ? 64u : 0u);
        bool is_paired = head < 40;
        uint32_t dim = is_paired ? paired : strip_of_head * 16 + row_2;
        float value_3 = shuffle_xor_f32(value_2, 1);
        uint32_t pair = pack_bf16x2(value_2, value_3);
        if (lane < 16 && lane % 2 == 0) {
          uint32_t place = (column * 6144 + head * 128 + dim) / 2;
          publish_flagged(exchange_words + (place + 2080), pair, layer_epoch);
        }
      }
      turn = turn ^ 1;
      finisher = finisher + 1;
      if (finisher == 8) {
        finisher = 0;
      }
    }
  }
}

__device__ __forceinline__ void attention(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step,
    uint32_t layer, uint8_t* arena, const int32_t* kv_plans, uint32_t plan_index, const int32_t* tiles, uint32_t warp,
    uint32_t lane, const bf16* head_norms, uint64_t* exchange_words, uint32_t layer_epoch, const int32_t* page_table,
    bf16* kv, uint32_t& use_stage, uint64_t* full, uint32_t& use_parity, uint8_t* ring, uint64_t* empty) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + (layer * 5 + 1));
  }
  uint4 numbers = ((uint4*)(arena + RECORDS))[0];
  #pragma unroll 1
  for (uint32_t number = numbers.x; number < numbers.y; ++number) {
    uint32_t index = number - numbers.x;
    uint4* record = (uint4*)(arena + RECORDS) + (1 + (index < 4 ? index : 4) * 4);
    if (index >= 4) {
      named_barrier(1, 256);
      if (thread == 0) {
        const int32_t* record_2 = kv_plans + (plan_index * 2880 + (number * 8 + 256));
        uint4 what = load_constant_u32x4(record_2);
        record[0] = what;
        uint4 value = load_constant_u32x4(record_2 + 4);
        record[1] = value;
        const int32_t* record_3 = tiles + what.y * 8;
        uint4 value_2 = load_constant_u32x4(record_3);
        (record + 2)[0] = value_2;
        uint4 value_3 = load_constant_u32x4(record_3 + 4);
        (record + 2)[1] = value_3;
      }
      named_barrier(1, 256);
    }
    uint4 what = record[0];
    uint32_t cached_end = record[1].x < record[3].x + record[3].y * step ? record[1].x : record[3].x + record[3].y * step;
    uint32_t newest_begin = what.w < record[3].x + record[3].y * step ? record[3].x + record[3].y * step : what.w;
    uint32_t newest_end = record[1].x < record[3].x + record[3].y * step + record[3].z ? record[1].x : record[3].x + record[3].y * step + record[3].z;
    uint32_t newest = newest_begin < newest_end ? newest_end - newest_begin : 0;
    uint32_t query_units = record[1].z * 16;
    uint32_t key_end = query_units + newest * 16;
    uint32_t units = key_end + newest * 16;
    #pragma unroll 1
    for (uint32_t first = warp * 32; first < units; first += 256) {
      uint32_t own = first + lane;
      uint32_t number_2 = own < units - 1 ? own : units - 1;
      bool is_value = number_2 >= key_end;
      uint32_t newest_unit = number_2 - (is_value ? key_end : query_units);
      uint32_t row = number_2 / 16;
      uint32_t newest_column = record[3].w + (newest_begin - (record[3].x + record[3].y * step)) + newest_unit / 16;
      uint32_t column = number_2 < query_units ? record[2].x + row / 4 : newest_column;
      uint32_t kv_head = 32 + (is_value ? 8u : 0u) + what.z;
      uint32_t head = number_2 < query_units ? what.z * 4 + row % 4 : kv_head;
      uint32_t kind = head < 32 ? 0u : 1u;
      uint4 words = load_constant_u32x4(head_norms + ((layer * 2 + kind) * 128 + number_2 % 16 * 8));
      uint4 words_2 = wait_flagged4(exchange_words + ((column * 768 + head * 16 + number_2 % 16) * 4 + 2080), layer_epoch);
      float values[8];
      values[0] = bf16x2_low(words_2.x);
      values[1] = bf16x2_high(words_2.x);
      values[2] = bf16x2_low(words_2.y);
      values[3] = bf16x2_high(words_2.y);
      values[4] = bf16x2_low(words_2.z);
      values[5] = bf16x2_high(words_2.z);
      values[6] = bf16x2_low(words_2.w);
      values[7] = bf16x2_high(words_2.w);
      float squares = 0.0f;
      squares = squares + values[0] * values[0];
      squares = squares + values[1] * values[1];
      squares = squares + values[2] * values[2];
      squares = squares + values[3] * values[3];
      squares = squares + values[4] * values[4];
      squares = squares + values[5] * values[5];
      squares = squares + values[6] * values[6];
      squares = squares + values[7] * values[7];
      float value = shuffle_xor_f32(squares, 1);
      squares = squares + value;
      float value_2 = shuffle_xor_f32(squares, 2);
      squares = squares + value_2;
      float value_3 = shuffle_xor_f32(squares, 4);
      squares = squares + value_3;
      float value_4 = shuffle_xor_f32(squares, 8);
      squares = squares + value_4;
      float scale = rsqrt_f32(squares * 0.0078125f + 1e-06f);
      float scaled[8];
      scaled[0] = values[0] * scale * bf16x2_low(words.x);
      scaled[1] = values[1] * scale * bf16x2_high(words.x);
      scaled[2] = values[2] * scale * bf16x2_low(words.y);
      scaled[3] = values[3] * scale * bf16x2_high(words.y);
      scaled[4] = values[4] * scale * bf16x2_low(words.z);
      scaled[5] = values[5] * scale * bf16x2_high(words.z);
      scaled[6] = values[6] * scale * bf16x2_low(words.w);
      scaled[7] = values[7] * scale * bf16x2_high(words.w);
      float2* angles = (float2*)(arena + ROPE) + (column * 64 + number_2 % 16 % 8 * 8);
      bool is_second = number_2 % 16 >= 8;
      float rotated[8];
      float2 angle = angles[0];
      float partner = shuffle_xor_f32(scaled[0], 8);
      rotated[0] = scaled[0] * angle.x + (is_second ? partner : -partner) * angle.y;
      float2 angle_2 = angles[1];
      float partner_2 = shuffle_xor_f32(scaled[1], 8);
      rotated[1] = scaled[1] * angle_2.x + (is_second ? partner_2 : -partner_2) * angle_2.y;
      float2 angle_3 = angles[2];
      float partner_3 = shuffle_xor_f32(scaled[2], 8);
      rotated[2] = scaled[2] * angle_3.x + (is_second ? partner_3 : -partner_3) * angle_3.y;
      float2 angle_4 = angles[3];
      float partner_4 = shuffle_xor_f32(scaled[3], 8);
      rotated[3] = scaled[3] * angle_4.x + (is_second ? partner_4 : -partner_4) * angle_4.y;
      float2 angle_5 = angles[4];
      float partner_5 = shuffle_xor_f32(scaled[4], 8);
      rotated[4] = scaled[4] * angle_5.x + (is_second ? partner_5 : -partner_5) * angle_5.y;
      float2 angle_6 = angles[5];
      float partner_6 = shuffle_xor_f32(scaled[5], 8);
      rotated[5] = scaled[5] * angle_6.x + (is_second ? partner_6 : -partner_6) * angle_6.y;
      float2 angle_7 = angles[6];
      float partner_7 = shuffle_xor_f32(scaled[6], 8);
      rotated[6] = scaled[6] * angle_7.x + (is_second ? partner_7 : -partner_7) * angle_7.y;
      float2 angle_8 = angles[7];
      float partner_8 = shuffle_xor_f32(scaled[7], 8);
      rotated[7] = scaled[7] * angle_8.x + (is_second ? partner_8 : -partner_8) * angle_8.y;
      bool is_value_2 = head >= 40;
      values[0] = is_value_2 ? values[0] : rotated[0];
      values[1] = is_value_2 ? values[1] : rotated[1];
      values[2] = is_value_2 ? values[2] : rotated[2];
      values[3] = is_value_2 ? values[3] : rotated[3];
      values[4] = is_value_2 ? values[4] : rotated[4];
      values[5] = is_value_2 ? values[5] : rotated[5];
      values[6] = is_value_2 ? values[6] : rotated[6];
      values[7] = is_value_2 ? values[7] : rotated[7];
      if (own < units) {
        if (number_2 < query_units) {
          ((uint4*)(arena + QUERIES))[number_2] = make_u32x4(pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]), pack_bf16x2(values[4], values[5]), pack_bf16x2(values[6], values[7]));
        } else {
          uint4* keys = (uint4*)(arena + NEWEST);
          uint4* values_2 = (uint4*)(arena + NEWEST) + 256;
          uint4* place = (is_value ? values_2 : keys) + newest_unit;
          place[0] = make_u32x4(pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]), pack_bf16x2(values[4], values[5]), pack_bf16x2(values[6], values[7]));
          if (column - record[2].x < record[2].y) {
            if (((uint32_t*)(arena + COLUMNS))[column * 8 + 1] < ((uint32_t*)(arena + COLUMNS))[column * 8 + 2]) {
              uint32_t table = ((uint32_t*)(arena + COLUMNS))[column * 8 + 6] * 512;
              uint32_t page = load_constant_u32(page_table + (table + ((uint32_t*)(arena + COLUMNS))[column * 8] / 16));
              uint64_t offset = (uint64_t)(layer) * 16777216 + (uint64_t)(page) * 32768;
              bf16* key = kv + (offset + (uint64_t)((head - 32) % 8 * 2048 + ((uint32_t*)(arena + COLUMNS))[column * 8] % 16 * 128));
              bf16* place_2 = head - 32 < 8 ? key : key + 16384;
              ((uint4*)(place_2 + number_2 % 16 * 8))[0] = make_u32x4(pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]), pack_bf16x2(values[4], values[5]), pack_bf16x2(values[6], values[7]));
              fence_proxy_async();
            }
          }
        }
      }
    }
    named_barrier(1, 256);
    uint4* shared = (uint4*)(arena + QUERIES);
    uint32_t row = lane / 4 < 7 ? lane / 4 : 7;
    uint4* query = shared + row * 16;
    uint32_t limits[2];
    uint32_t fused = lane % 4 * 2;
    uint32_t present = fused < record[1].z - 1 ? fused : record[1].z - 1;
    uint32_t end = record[1].x < record[3].x + record[3].y * step + record[3].z ? record[1].x : record[3].x + record[3].y * step + record[3].z;
    uint32_t position = ((uint32_t*)(arena + COLUMNS))[(record[2].x + present / 4) * 8];
    uint32_t following = position + 1;
    uint32_t visible = following > record[2].w ? following - record[2].w : 0;
    limits[0] = fused < record[1].z ? (end < visible ? end : visible) : 0;
    uint32_t fused_2 = lane % 4 * 2 + 1;
    uint32_t present_2 = fused_2 < record[1].z - 1 ? fused_2 : record[1].z - 1;
    uint32_t end_2 = record[1].x < record[3].x + record[3].y * step + record[3].z ? record[1].x : record[3].x + record[3].y * step + record[3].z;
    uint32_t position_2 = ((uint32_t*)(arena + COLUMNS))[(record[2].x + present_2 / 4) * 8];
    uint32_t following_2 = position_2 + 1;
    uint32_t visible_2 = following_2 > record[2].w ? following_2 - record[2].w : 0;
    limits[1] = fused_2 < record[1].z ? (end_2 < visible_2 ? end_2 : visible_2) : 0;
    float highest[2];
    float weight_sum[2] = {};
    float output[8][4] = {};
    highest[0] = -bits_float(0x7f800000);
    highest[1] = -bits_float(0x7f800000);
    uint32_t cached = what.w < cached_end ? cached_end - what.w : 0;
    uint32_t tiles_2 = (cached + 15) / 16;
    uint32_t all_tiles = tiles_2 + (newest + 15) / 16;
    uint32_t tile = warp;
    while (tile < all_tiles) {
      uint32_t stage = tile / 2;
      uint32_t first_tile = stage * 2;
      uint32_t last_tile = first_tile + 2 < tiles_2 ? first_tile + 2 : tiles_2;
      uint32_t first_key = what.w + stage * 32;
      uint32_t count = cached_end - first_key < 32 ? cached_end - first_key : 32;
      bool is_cached = tile < tiles_2;
      uint32_t groups = last_tile - first_tile < 8 ? last_tile - first_tile : 8;
      uint32_t number_2 = (warp + 8 - first_tile % 8) % 8;
      uint32_t arrivals = 8 / groups + (number_2 < 8 % groups ? 1u : 0u);
      uint32_t place = use_stage + stage;
      uint32_t stage_2 = place % 12;
      if (is_cached) {
        mbarrier_wait(full + stage_2, (use_parity + place / 12) % 2);
      }
      uint8_t* chunk = ring + stage_2 * 16384;
      uint8_t* keys = chunk;
      uint8_t* values = chunk + 8192;
      if (tile >= tiles_2) {
        uint8_t* newest_keys = arena + NEWEST;
        uint8_t* newest_values = arena + NEWEST + 4096;
        first_tile = tiles_2;
        last_tile = all_tiles;
        first_key = newest_begin;
        count = newest;
        keys = newest_keys;
        values = newest_values;
      }
      while (tile < last_tile) {
        uint32_t row_2 = (tile - first_tile) * 16;
        float sums[2][4] = {};
        uint32_t row_3 = row_2 + lane / 4;
        uint32_t words[2][4];
        const uint4* keys_2 = (const uint4*)(keys) + row_3 * 16;
        uint32_t is_odd = lane / 4 % 2;
        uint4 first = keys_2[is_odd * 4 + lane % 4];
        uint4 second = keys_2[(1 - is_odd) * 4 + lane % 4];
        words[0][0] = is_odd == 0 ? first.x : second.x;
        words[1][0] = is_odd == 0 ? second.x : first.x;
        words[0][1] = is_odd == 0 ? first.y : second.y;
        words[1][1] = is_odd == 0 ? second.y : first.y;
        words[0][2] = is_odd == 0 ? first.z : second.z;
        words[1][2] = is_odd == 0 ? second.z : first.z;
        words[0][3] = is_odd == 0 ? first.w : second.w;
        words[1][3] = is_odd == 0 ? second.w : first.w;
        uint32_t words_2[2][4];
        const uint4* keys_3 = (const uint4*)(keys) + (row_3 + 8) * 16;
        uint32_t is_odd_2 = lane / 4 % 2;
        uint4 first_2 = keys_3[is_odd_2 * 4 + lane % 4];
        uint4 second_2 = keys_3[(1 - is_odd_2) * 4 + lane % 4];
        words_2[0][0] = is_odd_2 == 0 ? first_2.x : second_2.x;
        words_2[1][0] = is_odd_2 == 0 ? second_2.x : first_2.x;
        words_2[0][1] = is_odd_2 == 0 ? first_2.y : second_2.y;
        words_2[1][1] = is_odd_2 == 0 ? second_2.y : first_2.y;
        words_2[0][2] = is_odd_2 == 0 ? first_2.z : second_2.z;
        words_2[1][2] = is_odd_2 == 0 ? second_2.z : first_2.z;
        words_2[0][3] = is_odd_2 == 0 ? first_2.w : second_2.w;
        words_2[1][3] = is_odd_2 == 0 ? second_2.w : first_2.w;
        uint4 early = make_u32x4(words[0][0], words_2[0][0], words[0][1], words_2[0][1]);
        uint4 late = make_u32x4(words[0][2], words_2[0][2], words[0][3], words_2[0][3]);
        uint4 query_2 = query[lane % 4];
        mma_bf16(sums[0], early, query_2.x, query_2.y);
        mma_bf16(sums[1], late, query_2.z, query_2.w);
        uint4 early_2 = make_u32x4(words[1][0], words_2[1][0], words[1][1], words_2[1][1]);
        uint4 late_2 = make_u32x4(words[1][2], words_2[1][2], words[1][3], words_2[1][3]);
        uint4 query_3 = query[4 + lane % 4];
        mma_bf16(sums[0], early_2, query_3.x, query_3.y);
        mma_bf16(sums[1], late_2, query_3.z, query_3.w);
        uint32_t words_3[2][4];
        const uint4* keys_4 = (const uint4*)(keys) + row_3 * 16;
        uint32_t is_odd_3 = lane / 4 % 2;
        uint4 first_3 = keys_4[(2 + is_odd_3) * 4 + lane % 4];
        uint4 second_3 = keys_4[(2 + (1 - is_odd_3)) * 4 + lane % 4];
        words_3[0][0] = is_odd_3 == 0 ? first_3.x : second_3.x;
        words_3[1][0] = is_odd_3 == 0 ? second_3.x : first_3.x;
        words_3[0][1] = is_odd_3 == 0 ? first_3.y : second_3.y;
        words_3[1][1] = is_odd_3 == 0 ? second_3.y : first_3.y;
        words_3[0][2] = is_odd_3 == 0 ? first_3.z : second_3.z;
        words_3[1][2] = is_odd_3 == 0 ? second_3.z : first_3.z;
        words_3[0][3] = is_odd_3 == 0 ? first_3.w : second_3.w;
        words_3[1][3] = is_odd_3 == 0 ? second_3.w : first_3.w;
        uint32_t words_4[2][4];
        const uint4* keys_5 = (const uint4*)(keys) + (row_3 + 8) * 16;
        uint32_t is_odd_4 = lane / 4 % 2;
        uint4 first_4 = keys_5[(2 + is_odd_4) * 4 + lane % 4];
        uint4 second_4 = keys_5[(2 + (1 - is_odd_4)) * 4 + lane % 4];
        words_4[0][0] = is_odd_4 == 0 ? first_4.x : second_4.x;
        words_4[1][0] = is_odd_4 == 0 ? second_4.x : first_4.x;
        words_4[0][1] = is_odd_4 == 0 ? first_4.y : second_4.y;
        words_4[1][1] = is_odd_4 == 0 ? second_4.y : first_4.y;
        words_4[0][2] = is_odd_4 == 0 ? first_4.z : second_4.z;
        words_4[1][2] = is_odd_4 == 0 ? second_4.z : first_4.z;
        words_4[0][3] = is_odd_4 == 0 ? first_4.w : second_4.w;
        words_4[1][3] = is_odd_4 == 0 ? second_4.w : first_4.w;
        uint4 early_3 = make_u32x4(words_3[0][0], words_4[0][0], words_3[0][1], words_4[0][1]);
        uint4 late_3 = make_u32x4(words_3[0][2], words_4[0][2], words_3[0][3], words_4[0][3]);
        uint4 query_4 = query[8 + lane % 4];
        mma_bf16(sums[0], early_3, query_4.x, query_4.y);
        mma_bf16(sums[1], late_3, query_4.z, query_4.w);
        uint4 early_4 = make_u32x4(words_3[1][0], words_4[1][0], words_3[1][1], words_4[1][1]);
        uint4 late_4 = make_u32x4(words_3[1][2], words_4[1][2], words_3[1][3], words_4[1][3]);
        uint4 query_5 = query[12 + lane % 4];
        mma_bf16(sums[0], early_4, query_5.x, query_5.y);
        mma_bf16(sums[1], late_4, query_5.z, query_5.w);
        float logits[4];
        #pragma unroll
        for (uint32_t element = 0; element < 4; ++element) {
          logits[element] = sums[0][element] + sums[1][element];
        }
        uint32_t number_3 = lane / 4;
        uint32_t limits_2[2];
        limits_2[0] = limits[0] < first_key + row_2 + (count - row_2) ? limits[0] : first_key + row_2 + (count - row_2);
        limits_2[1] = limits[1] < first_key + row_2 + (count - row_2) ? limits[1] : first_key + row_2 + (count - row_2);
        bool is_seen = first_key + row_2 + number_3 < limits_2[0];
        float logit = logits[0] * 0.12751743f;
        logits[0] = is_seen ? logit : -bits_float(0x7f800000);
        bool is_seen_2 = first_key + row_2 + number_3 < limits_2[1];
        float logit_2 = logits[1] * 0.12751743f;
        logits[1] = is_seen_2 ? logit_2 : -bits_float(0x7f800000);
        uint32_t tile_key = number_3 + 8;
        bool is_seen_3 = first_key + row_2 + tile_key < limits_2[0];
        float logit_3 = logits[2] * 0.12751743f;
        logits[2] = is_seen_3 ? logit_3 : -bits_float(0x7f800000);
        uint32_t tile_key_2 = number_3 + 8;
        bool is_seen_4 = first_key + row_2 + tile_key_2 < limits_2[1];
        float logit_4 = logits[3] * 0.12751743f;
        logits[3] = is_seen_4 ? logit_4 : -bits_float(0x7f800000);
        #pragma unroll
        for (uint32_t column = 0; column < 2; ++column) {
          float peak = maximum_f32(logits[column], logits[column + 2]);
          float value = shuffle_xor_f32(peak, 4);
          peak = maximum_f32(peak, value);
          float value_2 = shuffle_xor_f32(peak, 8);
          peak = maximum_f32(peak, value_2);
          float value_3 = shuffle_xor_f32(peak, 16);
          peak = maximum_f32(peak, value_3);
          float new_highest = maximum_f32(highest[column], peak);
          float base = new_highest == -bits_float(0x7f800000) ? 0.0f : new_highest;
          float shrink = exp2_f32(highest[column] - base);
          highest[column] = new_highest;
          logits[column] = exp2_f32(logits[column] - base);
          logits[column + 2] = exp2_f32(logits[column + 2] - base);
          weight_sum[column] = weight_sum[column] * shrink + (logits[column] + logits[column + 2]);
          #pragma unroll
          for (uint32_t tile_2 = 0; tile_2 < 8; ++tile_2) {
            output[tile_2][column] = output[tile_2][column] * shrink;
            output[tile_2][column + 2] = output[tile_2][column + 2] * shrink;
          }
        }
        uint32_t weights_low = matrix_transpose_b16(pack_bf16x2(logits[0], logits[1]));
        uint32_t weights_high = matrix_transpose_b16(pack_bf16x2(logits[2], logits[3]));
        uint32_t words_5[2][4][4];
        uint32_t tile_key_3 = lane % 4 * 2 < count - row_2 - 1 ? lane % 4 * 2 : count - row_2 - 1;
        uint32_t row_4 = row_2 + tile_key_3;
        const uint4* units_2 = (const uint4*)(values) + (row_4 * 16 + lane / 4 * 2);
        uint32_t is_late = lane % 4 / 2;
        uint4 first_5 = units_2[is_late];
        uint4 second_5 = units_2[1 - is_late];
        words_5[0][0][0] = is_late == 0 ? first_5.x : second_5.x;
        words_5[1][0][0] = is_late == 0 ? second_5.x : first_5.x;
        words_5[0][0][1] = is_late == 0 ? first_5.y : second_5.y;
        words_5[1][0][1] = is_late == 0 ? second_5.y : first_5.y;
        words_5[0][0][2] = is_late == 0 ? first_5.z : second_5.z;
        words_5[1][0][2] = is_late == 0 ? second_5.z : first_5.z;
        words_5[0][0][3] = is_late == 0 ? first_5.w : second_5.w;
        words_5[1][0][3] = is_late == 0 ? second_5.w : first_5.w;
        uint32_t tile_key_4 = lane % 4 * 2 + 1 < count - row_2 - 1 ? lane % 4 * 2 + 1 : count - row_2 - 1;
        uint32_t row_5 = row_2 + tile_key_4;
        const uint4* units_3 = (const uint4*)(values) + (row_5 * 16 + lane / 4 * 2);
        uint32_t is_late_2 = lane % 4 / 2;
        uint4 first_6 = units_3[is_late_2];
        uint4 second_6 = units_3[1 - is_late_2];
        words_5[0][1][0] = is_late_2 == 0 ? first_6.x : second_6.x;
        words_5[1][1][0] = is_late_2 == 0 ? second_6.x : first_6.x;
        words_5[0][1][1] = is_late_2 == 0 ? first_6.y : second_6.y;
        words_5[1][1][1] = is_late_2 == 0 ? second_6.y : first_6.y;
        words_5[0][1][2] = is_late_2 == 0 ? first_6.z : second_6.z;
        words_5[1][1][2] = is_late_2 == 0 ? second_6.z : first_6.z;
        words_5[0][1][3] = is_late_2 == 0 ? first_6.w : second_6.w;
        words_5[1][1][3] = is_late_2 == 0 ? second_6.w : first_6.w;
        uint32_t tile_key_5 = lane % 4 * 2 + 8 < count - row_2 - 1 ? lane % 4 * 2 + 8 : count - row_2 - 1;
        uint32_t row_6 = row_2 + tile_key_5;
        const uint4* units_4 = (const uint4*)(values) + (row_6 * 16 + lane / 4 * 2);
        uint32_t is_late_3 = lane % 4 / 2;
        uint4 first_7 = units_4[is_late_3];
        uint4 second_7 = units_4[1 - is_late_3];
        words_5[0][2][0] = is_late_3 == 0 ? first_7.x : second_7.x;
        words_5[1][2][0] = is_late_3 == 0 ? second_7.x : first_7.x;
        words_5[0][2][1] = is_late_3 == 0 ? first_7.y : second_7.y;
        words_5[1][2][1] = is_late_3 == 0 ? second_7.y : first_7.y;
        words_5[0][2][2] = is_late_3 == 0 ? first_7.z : second_7.z;
        words_5[1][2][2] = is_late_3 == 0 ? second_7.z : first_7.z;
        words_5[0][2][3] = is_late_3 == 0 ? first_7.w : second_7.w;
        words_5[1][2][3] = is_late_3 == 0 ? second_7.w : first_7.w;
        uint32_t tile_key_6 = lane % 4 * 2 + 9 < count - row_2 - 1 ? lane % 4 * 2 + 9 : count - row_2 - 1;
        uint32_t row_7 = row_2 + tile_key_6;
        const uint4* units_5 = (const uint4*)(values) + (row_7 * 16 + lane / 4 * 2);
        uint32_t is_late_4 = lane % 4 / 2;
        uint4 first_8 = units_5[is_late_4];
        uint4 second_8 = units_5[1 - is_late_4];
        words_5[0][3][0] = is_late_4 == 0 ? first_8.x : second_8.x;
        words_5[1][3][0] = is_late_4 == 0 ? second_8.x : first_8.x;
        words_5[0][3][1] = is_late_4 == 0 ? first_8.y : second_8.y;
        words_5[1][3][1] = is_late_4 == 0 ? second_8.y : first_8.y;
        words_5[0][3][2] = is_late_4 == 0 ? first_8.z : second_8.z;
        words_5[1][3][2] = is_late_4 == 0 ? second_8.z : first_8.z;
        words_5[0][3][3] = is_late_4 == 0 ? first_8.w : second_8.w;
        words_5[1][3][3] = is_late_4 == 0 ? second_8.w : first_8.w;
        #pragma unroll
        for (uint32_t tile_2 = 0; tile_2 < 4; ++tile_2) {
          uint32_t low_early = byte_permute(words_5[0][0][tile_2 / 2], words_5[0][1][tile_2 / 2], tile_2 % 2 == 0 ? 21520u : 30258u);
          uint32_t high_early = byte_permute(words_5[0][0][(tile_2 + 4) / 2], words_5[0][1][(tile_2 + 4) / 2], (tile_2 + 4) % 2 == 0 ? 21520u : 30258u);
          uint32_t low_late = byte_permute(words_5[0][2][tile_2 / 2], words_5[0][3][tile_2 / 2], tile_2 % 2 == 0 ? 21520u : 30258u);
          uint32_t high_late = byte_permute(words_5[0][2][(tile_2 + 4) / 2], words_5[0][3][(tile_2 + 4) / 2], (tile_2 + 4) % 2 == 0 ? 21520u : 30258u);
          uint4 operand = make_u32x4(low_early, high_early, low_late, high_late);
          mma_bf16(output[tile_2], operand, weights_low, weights_high);
        }
        #pragma unroll
        for (uint32_t tile_2 = 0; tile_2 < 4; ++tile_2) {
          uint32_t low_early = byte_permute(words_5[1][0][tile_2 / 2], words_5[1][1][tile_2 / 2], tile_2 % 2 == 0 ? 21520u : 30258u);
          uint32_t high_early = byte_permute(words_5[1][0][(tile_2 + 4) / 2], words_5[1][1][(tile_2 + 4) / 2], (tile_2 + 4) % 2 == 0 ? 21520u : 30258u);
          uint32_t low_late = byte_permute(words_5[1][2][tile_2 / 2], words_5[1][3][tile_2 / 2], tile_2 % 2 == 0 ? 21520u : 30258u);
          uint32_t high_late = byte_permute(words_5[1][2][(tile_2 + 4) / 2], words_5[1][3][(tile_2 + 4) / 2], (tile_2 + 4) % 2 == 0 ? 21520u : 30258u);
          uint4 operand = make_u32x4(low_early, high_early, low_late, high_late);
          mma_bf16(output[4 + tile_2], operand, weights_low, weights_high);
        }
        tile = tile + 8;
      }
      wait_for_u32(float_bits(output[0][0]));
      warp_barrier();
      if (lane == 0 && is_cached) {
        mbarrier_arrive_many(empty + stage_2, arrivals);
      }
    }
    uint32_t place = use_stage + (cached + 31) / 32;
    use_parity = (use_parity + place / 12) % 2;
    use_stage = place % 12;
    float* words = (float*)(arena + STATISTICS);
    #pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      float total = weight_sum[column];
      float value = shuffle_xor_f32(total, 4);
      total = total + value;
      float value_2 = shuffle_xor_f32(total, 8);
      total = total + value_2;
      float value_3 = shuffle_xor_f32(total, 16);
      total = total + value_3;
      uint32_t number_2 = lane * 2 + column;
      if (number_2 < 4) {
        uint32_t place_2 = (warp * 4 + number_2) * 2;
        words[place_2] = highest[column];
        words[place_2 + 1] = total;
      }
    }
    uint4* scratch = (uint4*)(arena + ATTENTION);
    #pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      uint32_t number_2 = lane % 4 * 2 + column;
      if (number_2 < 4) {
        uint32_t row_2 = (warp * 4 + number_2) * 2;
        uint4* place_2 = scratch + (row_2 * 64 + lane / 4 * 8) / 4;
        place_2[0] = make_u32x4(float_bits(output[0][column]), float_bits(output[1][column]), float_bits(output[2][column]), float_bits(output[3][column]));
        place_2[1] = make_u32x4(float_bits(output[0][column + 2]), float_bits(output[1][column + 2]), float_bits(output[2][column + 2]), float_bits(output[3][column + 2]));
        uint4* place_3 = scratch + ((row_2 + 1) * 64 + lane / 4 * 8) / 4;
        place_3[0] = make_u32x4(float_bits(output[4][column]), float_bits(output[5][column]), float_bits(output[6][column]), float_bits(output[7][column]));
        place_3[1] = make_u32x4(float_bits(output[4][column + 2]), float_bits(output[5][column + 2]), float_bits(output[6][column + 2]), float_bits(output[7][column + 2]));
      }
    }
    named_barrier(1, 256);
    uint32_t rows = record[1].z;
    #pragma unroll 1
    for (uint32_t output_2 = thread; output_2 < rows * 64; output_2 += 256) {
      uint32_t place_2 = output_2 / 64;
      uint32_t pair = output_2 % 64;
      float2* scratch_2 = (float2*)(arena + ATTENTION);
      float2* statistics = (float2*)(arena + STATISTICS);
      float low = 0.0f;
      float high = 0.0f;
      float highest_2 = -bits_float(0x7f800000);
      #pragma unroll
      for (uint32_t other = place_2; other < 32; other += 4) {
        highest_2 = maximum_f32(highest_2, statistics[other].x);
      }
      float base = highest_2 == -bits_float(0x7f800000) ? 0.0f : highest_2;
      float weight_sum_2 = 0.0f;
      #pragma unroll
      for (uint32_t other = place_2; other < 32; other += 4) {
        float2 numbers_2 = statistics[other];
        float weight = exp2_f32(numbers_2.x - base);
        float2 part = scratch_2[other * 64 + pair];
        weight_sum_2 = weight_sum_2 + weight * numbers_2.y;
        low = low + weight * part.x;
        high = high + weight * part.y;
      }
      float inverse = weight_sum_2 == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum_2);
      float lse = weight_sum_2 == 0.0f ? -bits_float(0x7f800000) : highest_2 * 0.6931472f + log_f32(weight_sum_2);
      float low_2 = low * inverse;
      float high_2 = high * inverse;
      uint32_t dim_pair = (pair % 32 / 4 * 2 + pair / 32) * 4 + pair % 32 % 4;
      if (record[1].y == 4294967295u) {
        uint32_t column = record[2].x + place_2 / 4;
        publish_flagged(exchange_words + (((((what.z * 4 + place_2 % 4) * 128 + dim_pair * 2) / 32 + column) * 4 + ((what.z * 4 + place_2 % 4) * 128 + dim_pair * 2) / 8 % 4) * 4 + ((what.z * 4 + place_2 % 4) * 128 + dim_pair * 2) % 8 / 2 + 144544), pack_bf16x2(low_2, high_2), layer_epoch);
      } else {
        uint32_t partial = (record[1].y + place_2) * 132;
        publish_flagged(exchange_words + (partial + dim_pair * 2 + 5152), float_bits(low_2), layer_epoch);
        publish_flagged(exchange_words + (partial + dim_pair * 2 + 1 + 5152), float_bits(high_2), layer_epoch);
        if (dim_pair < 4) {
          publish_flagged(exchange_words + (partial + 128 + dim_pair + 5152), float_bits(lse), layer_epoch);
        }
      }
    }
    named_barrier(1, 256);
  }
  // merge of partial states
  uint4 numbers_2 = ((uint4*)(arena + RECORDS))[0];
  uint4* record = (uint4*)(arena + RECORDS) + (21 + warp / 4 * 8);
  uint32_t first_job = warp / 4 * 132 + block;
  #pragma unroll 1
  for (uint32_t job = first_job; job < numbers_2.z; job += 264) {
    if (job != first_job) {
      named_barrier(warp / 4 + 2, 128);
      if (warp % 4 == 0) {
        uint4* place = (uint4*)(arena + RECORDS) + (21 + warp / 4 * 8);
        uint32_t number = load_constant_u32(kv_plans + (plan_index * 2880 + (job / numbers_2.w * 2 + 2496)));
        uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + (job / numbers_2.w * 2 + 1 + 2496)));
        uint32_t begin = load_constant_u32(kv_plans + (plan_index * 2880 + (job / numbers_2.w + 2432)));
        uint32_t end = load_constant_u32(kv_plans + (plan_index * 2880 + (job / numbers_2.w + 1 + 2432)));
        if (lane == 0) {
          place[0] = make_u32x4(head, job % numbers_2.w, begin, end);
          const int32_t* record_2 = tiles + number * 8;
          uint4 value = load_constant_u32x4(record_2);
          (place + 1)[0] = value;
          uint4 value_2 = load_constant_u32x4(record_2 + 4);
          (place + 1)[1] = value_2;
        }
        uint32_t* sources = (uint32_t*)(place + 3);
        if (lane < (end - begin < 20 ? end - begin : 20)) {
          uint32_t value = load_constant_u32(kv_plans + (plan_index * 2880 + (begin + lane + 2560)));
          sources[lane] = value;
        }
      }
      named_barrier(warp / 4 + 2, 128);
    }
    if (record[0].y < record[1].y * 4) {
      float highest = -bits_float(0x7f800000);
      float weight_sum = 0.0f;
      float sums[4] = {};
      uint32_t sources = record[0].w - record[0].z;
      if (sources <= 4) {
        if (warp % 4 == 0) {
          uint32_t own = record[0].w - record[0].z;
          #pragma unroll 1
          for (uint32_t first = 0; first < own; first += 5) {
            uint32_t count = own - first < 5 ? own - first : 5;
            uint32_t number = first + (lane < count - 1 ? lane : count - 1);
            uint32_t source;
            if (number < 20) {
              source = ((const uint32_t*)((uint4*)(arena + RECORDS) + (21 + warp / 4 * 8) + 3))[number];
            } else {
              uint32_t value = load_constant_u32(kv_plans + (plan_index * 2880 + (record[0].z + number + 2560)));
              source = value;
            }
            uint4 states[8];
            uint32_t places[8];
            places[0] = ((source + record[0].y) * 33 + 32) * 4;
            #pragma unroll
            for (uint32_t number_2 = 0; number_2 < 5; ++number_2) {
              uint32_t source_2 = shuffle_u32(source, number_2);
              places[number_2 + 1] = ((source_2 + record[0].y) * 33 + lane % 32) * 4;
            }
            wait_flagged_places(states, exchange_words + 5152, places, 6, layer_epoch);
            #pragma unroll
            for (uint32_t number_2 = 0; number_2 < 5; ++number_2) {
              if (number_2 < count) {
                uint32_t value = shuffle_u32(states[0].x, number_2);
                float lse = bits_float(value);
                float new_highest = maximum_f32(highest, lse);
                float base = new_highest == -bits_float(0x7f800000) ? 0.0f : new_highest;
                float shrink = exp2_f32((highest - base) * 1.442695f);
                float grow = exp2_f32((lse - base) * 1.442695f);
                highest = new_highest;
                weight_sum = weight_sum * shrink + grow * 1.0f;
                sums[0] = sums[0] * shrink + grow * bits_float(states[number_2 + 1].x);
                sums[1] = sums[1] * shrink + grow * bits_float(states[number_2 + 1].y);
                sums[2] = sums[2] * shrink + grow * bits_float(states[number_2 + 1].z);
                sums[3] = sums[3] * shrink + grow * bits_float(states[number_2 + 1].w);
              }
            }
          }
        }
      } else {
        uint32_t own = (record[0].w - record[0].z + 3 - warp % 4) / 4;
        #pragma unroll 1
        for (uint32_t first = 0; first < own; first += 5) {
          uint32_t count = own - first < 5 ? own - first : 5;
          uint32_t number = warp % 4 + first * 4 + (lane < count - 1 ? lane : count - 1) * 4;
          uint32_t source;
          if (number < 20) {
            source = ((const uint32_t*)((uint4*)(arena + RECORDS) + (21 + warp / 4 * 8) + 3))[number];
          } else {
            uint32_t value = load_constant_u32(kv_plans + (plan_index * 2880 + (record[0].z + number + 2560)));
            source = value;
          }
          uint4 states[8];
          uint32_t places[8];
          places[0] = ((source + record[0].y) * 33 + 32) * 4;
          #pragma unroll
          for (uint32_t number_2 = 0; number_2 < 5; ++number_2) {
            uint32_t source_2 = shuffle_u32(source, number_2);
            places[number_2 + 1] = ((source_2 + record[0].y) * 33 + lane % 32) * 4;
          }
          wait_flagged_places(states, exchange_words + 5152, places, 6, layer_epoch);
          #pragma unroll
          for (uint32_t number_2 = 0; number_2 < 5; ++number_2) {
            if (number_2 < count) {
              uint32_t value = shuffle_u32(states[0].x, number_2);
              float lse = bits_float(value);
              float new_highest = maximum_f32(highest, lse);
              float base = new_highest == -bits_float(0x7f800000) ? 0.0f : new_highest;
              float shrink = exp2_f32((highest - base) * 1.442695f);
              float grow = exp2_f32((lse - base) * 1.442695f);
              highest = new_highest;
              weight_sum = weight_sum * shrink + grow * 1.0f;
              sums[0] = sums[0] * shrink + grow * bits_float(states[number_2 + 1].x);
              sums[1] = sums[1] * shrink + grow * bits_float(states[number_2 + 1].y);
              sums[2] = sums[2] * shrink + grow * bits_float(states[number_2 + 1].z);
              sums[3] = sums[3] * shrink + grow * bits_float(states[number_2 + 1].w);
            }
          }
        }
        uint4* place = (uint4*)(arena + ATTENTION) + warp * 33;
        place[lane] = make_u32x4(float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3]));
        if (lane == 0) {
          place[32] = make_u32x4(float_bits(highest), float_bits(weight_sum), 0, 0);
        }
        named_barrier(warp / 4 + 2, 128);
        if (warp % 4 == 0) {
          #pragma unroll
          for (uint32_t number = 1; number < 4; ++number) {
            uint4* place_2 = (uint4*)(arena + ATTENTION) + (warp + number) * 33;
            uint4 part = place_2[lane];
            uint4 shared = place_2[32];
            float new_highest = maximum_f32(highest, bits_float(shared.x));
            float base = new_highest == -bits_float(0x7f800000) ? 0.0f : new_highest;
            float shrink = exp2_f32((highest - base) * 1.442695f);
            float grow = exp2_f32((bits_float(shared.x) - base) * 1.442695f);
            highest = new_highest;
            weight_sum = weight_sum * shrink + grow * bits_float(shared.y);
            sums[0] = sums[0] * shrink + grow * bits_float(part.x);
            sums[1] = sums[1] * shrink + grow * bits_float(part.y);
            sums[2] = sums[2] * shrink + grow * bits_float(part.z);
            sums[3] = sums[3] * shrink + grow * bits_float(part.w);
          }
        }
      }
      if (warp % 4 == 0) {
        float inverse = weight_sum == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum);
        float lse = weight_sum == 0.0f ? -bits_float(0x7f800000) : highest + log_f32(weight_sum);
        if (lane < 32) {
          uint32_t dim_pair = lane % 32 * 2;
          float low = sums[0] * inverse;
          float high = sums[1] * inverse;
          uint32_t column = record[1].x + record[0].y / 4;
          publish_flagged(exchange_words + (((((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair * 2) / 32 + column) * 4 + ((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair * 2) / 8 % 4) * 4 + ((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair * 2) % 8 / 2 + 144544), pack_bf16x2(low, high), layer_epoch);
          uint32_t dim_pair_2 = lane % 32 * 2 + 1;
          float low_2 = sums[2] * inverse;
          float high_2 = sums[3] * inverse;
          uint32_t column_2 = record[1].x + record[0].y / 4;
          publish_flagged(exchange_words + (((((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair_2 * 2) / 32 + column_2) * 4 + ((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair_2 * 2) / 8 % 4) * 4 + ((record[0].x * 4 + record[0].y % 4) * 128 + dim_pair_2 * 2) % 8 / 2 + 144544), pack_bf16x2(low_2, high_2), layer_epoch);
        }
      }
    }
  }
  if (first_job + 264 < numbers_2.z) {
    named_barrier(warp / 4 + 2, 128);
    if (warp % 4 == 0) {
      uint4* place = (uint4*)(arena + RECORDS) + (21 + warp / 4 * 8);
      uint32_t number = load_constant_u32(kv_plans + (plan_index * 2880 + (first_job / numbers_2.w * 2 + 2496)));
      uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + (first_job / numbers_2.w * 2 + 1 + 2496)));
      uint32_t begin = load_constant_u32(kv_plans + (plan_index * 2880 + (first_job / numbers_2.w + 2432)));
      uint32_t end = load_constant_u32(kv_plans + (plan_index * 2880 + (first_job / numbers_2.w + 1 + 2432)));
      if (lane == 0) {
        place[0] = make_u32x4(head, first_job % numbers_2.w, begin, end);
        const int32_t* record_2 = tiles + number * 8;
        uint4 value = load_constant_u32x4(record_2);
        (place + 1)[0] = value;
        uint4 value_2 = load_constant_u32x4(record_2 + 4);
        (place + 1)[1] = value_2;
      }
      uint32_t* sources = (uint32_t*)(place + 3);
      if (lane < (end - begin < 20 ? end - begin : 20)) {
        uint32_t value = load_constant_u32(kv_plans + (plan_index * 2880 + (begin + lane + 2560)));
        sources[lane] = value;
      }
    }
    named_barrier(warp / 4 + 2, 128);
  }
  if (numbers_2.z > 0) {
    named_barrier(1, 256);
  }
}

// projection onto the residual
__device__ __forceinline__ void o(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step, uint32_t layer,
    uint8_t* arena, uint32_t lane, uint64_t* exchange_words, uint32_t layer_epoch, uint64_t* full, uint32_t& use_stage,
    uint32_t& use_parity, uint8_t* ring, uint32_t warp, uint64_t* empty, uint32_t& turn, uint32_t& finisher) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + (layer * 5 + 2));
  }
  uint32_t position = block % 132;
  if (position < 256) {
    uint4* vector = (uint4*)(arena + VECTOR);
    uint32_t first_unit = thread;
    if (lane == 0) {
      uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 144544), layer_epoch);
    }
    warp_barrier();
    uint4 units[8];
    wait_flagged_units(units, exchange_words + (first_unit * 4 + 144544), 1024, 2, layer_epoch);
    #pragma unroll
    for (uint32_t number = 0; number < 2; ++number) {
      vector[first_unit + number * 256] = units[number];
    }
    named_barrier(1, 256);
    #pragma unroll 1
    for (uint32_t strip = position; strip < 256; strip += 132) {
      float sums[1][4] = {};
      #pragma unroll 2
      for (uint32_t chunk = 0; chunk < 8; ++chunk) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk_2 = ring + use_stage * 16384;
        uint4* vector_2 = (uint4*)(arena + VECTOR);
        const uint4* fragments = (const uint4*)(chunk_2);
        #pragma unroll
        for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
          uint32_t pair = turn_2 * 8 + warp;
          uint4 first = fragments[pair * 64 + lane];
          uint4 second = fragments[pair * 64 + 32 + lane];
          uint4* units_2 = vector_2 + (chunk * 16 + pair) * 4;
          uint4 values = units_2[lane % 4];
          mma_bf16(sums[0], first, values.x, values.y);
          mma_bf16(sums[0], second, values.z, values.w);
          wait_for_u32(first.x ^ second.x);
        }
        warp_barrier();
        if (lane == 0) {
          mbarrier_arrive(empty + use_stage);
        }
        use_stage = use_stage + 1;
        if (use_stage == 12) {
          use_stage = 0;
          use_parity = use_parity ^ 1;
        }
      }
      float* reductions = (float*)(arena + REDUCTIONS) + turn * 128;
      uint32_t row = warp * 16 + lane / 4;
      uint32_t first = lane % 4 * 2;
      if (first < 1) {
        uint32_t place = row + first;
        reductions[place] = sums[0][0];
        reductions[place + 8] = sums[0][2];
      }
      named_barrier(1, 256);
      if (warp == finisher) {
        uint32_t column = 0;
        uint32_t row_2 = lane % 16;
        uint32_t half = lane / 16;
        float half_sum = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 4; ++other) {
          uint32_t place = (half * 4 + other) * 16 + row_2;
          half_sum = half_sum + reductions[place + column];
        }
        float value = shuffle_xor_f32(half_sum, 16);
        float row_sum = half_sum + value;
        float* residual = (float*)(arena + RESIDUAL);
        float value_2 = row_sum;
        if (lane < 16) {
          uint32_t place = strip / 132 * 16 + row_2 + column;
          value_2 = value_2 + residual[place];
          residual[place] = value_2;
        }
        float neighbour = shuffle_xor_f32(value_2, 1);
        uint32_t pair = pack_bf16x2(value_2, neighbour);
        if (lane < 16 && lane % 2 == 0) {
          publish_flagged(exchange_words + ((((strip * 16 + lane) / 32 + column) * 4 + (strip * 16 + lane) / 8 % 4) * 4 + (strip * 16 + lane) % 8 / 2 + 146592), pair, layer_epoch);
        }
      }
      turn = turn ^ 1;
      finisher = finisher + 1;
      if (finisher == 8) {
        finisher = 0;
      }
    }
  }
}

// norm, gate and up, SwiGLU
__device__ __forceinline__ void gate_up(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step,
    uint32_t layer, const bf16* norms, uint8_t* arena, uint32_t lane, uint64_t* exchange_words, uint32_t layer_epoch,
    uint32_t warp, uint32_t column_count, uint64_t* full, uint32_t& use_stage, uint32_t& use_parity, uint8_t* ring,
    uint64_t* empty, uint32_t& turn, uint32_t& finisher) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + (layer * 5 + 3));
  }
  const uint8_t* lines = (const uint8_t*)(norms + (layer * 2 + 2) * 4096);
  if (thread == 0) {
    #pragma unroll 1
    for (uint32_t offset = block * 128; offset < 8192; offset += 16896) {
      prefetch_l2(lines + offset);
    }
  }
  uint32_t position = (block + 8) % 132;
  if (position < 1536) {
    uint4* vector = (uint4*)(arena + VECTOR);
    float squares = 0.0f;
    uint32_t first_unit = thread;
    uint4 weights[8];
    #pragma unroll
    for (uint32_t number = 0; number < 2; ++number) {
      uint4 value = load_constant_u32x4(norms + (layer * 2 + 1) * 4096 + (first_unit + number * 256) * 8);
      weights[number] = value;
    }
    if (lane == 0) {
      uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 146592), layer_epoch);
    }
    warp_barrier();
    uint4 units[8];
    wait_flagged_units(units, exchange_words + (first_unit * 4 + 146592), 1024, 2, layer_epoch);
    #pragma unroll
    for (uint32_t number = 0; number < 2; ++number) {
      float low = bf16x2_low(units[number].x);
      float high = bf16x2_high(units[number].x);
      squares = squares + (low * low + high * high);
      uint32_t weights_2 = weights[number].x;
      float low_2 = bf16x2_low(units[number].y);
      float high_2 = bf16x2_high(units[number].y);
      squares = squares + (low_2 * low_2 + high_2 * high_2);
      uint32_t weights_3 = weights[number].y;
      float low_3 = bf16x2_low(units[number].z);
      float high_3 = bf16x2_high(units[number].z);
      squares = squares + (low_3 * low_3 + high_3 * high_3);
      uint32_t weights_4 = weights[number].z;
      float low_4 = bf16x2_low(units[number].w);
      float high_4 = bf16x2_high(units[number].w);
      squares = squares + (low_4 * low_4 + high_4 * high_4);
      uint32_t weights_5 = weights[number].w;
      vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_2), high * bf16x2_high(weights_2)), pack_bf16x2(low_2 * bf16x2_low(weights_3), high_2 * bf16x2_high(weights_3)), pack_bf16x2(low_3 * bf16x2_low(weights_4), high_3 * bf16x2_high(weights_4)), pack_bf16x2(low_4 * bf16x2_low(weights_5), high_4 * bf16x2_high(weights_5)));
    }
    float* partial_sums = (float*)(arena + PARTIAL_SUMS);
    float* scales = (float*)(arena + SCALES);
    float sum_of_token = squares;
    float value = shuffle_xor_f32(sum_of_token, 16);
    sum_of_token = sum_of_token + value;
    float value_2 = shuffle_xor_f32(sum_of_token, 8);
    sum_of_token = sum_of_token + value_2;
    float value_3 = shuffle_xor_f32(sum_of_token, 4);
    sum_of_token = sum_of_token + value_3;
    float value_4 = shuffle_xor_f32(sum_of_token, 2);
    sum_of_token = sum_of_token + value_4;
    float value_5 = shuffle_xor_f32(sum_of_token, 1);
    sum_of_token = sum_of_token + value_5;
    if (lane % 4 == 0 && lane < 4) {
      partial_sums[warp * 8 + lane / 4] = sum_of_token;
    }
    named_barrier(1, 256);
    if (thread < column_count) {
      float total = 0.0f;
      #pragma unroll
      for (uint32_t other = 0; other < 8; ++other) {
        uint32_t warp_2 = other + thread / 8;
        total = total + partial_sums[warp_2 * 8 + thread % 8];
      }
      scales[thread] = rsqrt_f32(total * 0.000244140625f + 1e-06f);
    }
    #pragma unroll 1
    for (uint32_t strip = position; strip < 1536; strip += 132) {
      float sums[1][4] = {};
      #pragma unroll 2
      for (uint32_t chunk = 0; chunk < 8; ++chunk) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk_2 = ring + use_stage * 16384;
        uint4* vector_2 = (uint4*)(arena + VECTOR);
        const uint4* fragments = (const uint4*)(chunk_2);
        #pragma unroll
        for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
          uint32_t pair = turn_2 * 8 + warp;
          uint4 first = fragments[pair * 64 + lane];
          uint4 second = fragments[pair * 64 + 32 + lane];
          uint4* units_2 = vector_2 + (chunk * 16 + pair) * 4;
          uint4 values = units_2[lane % 4];
          mma_bf16(sums[0], first, values.x, values.y);
          mma_bf16(sums[0], second, values.z, values.w);
          wait_for_u32(first.x ^ second.x);
        }
        warp_barrier();
        if (lane == 0) {
          mbarrier_arrive(empty + use_stage);
        }
        use_stage = use_stage + 1;
        if (use_stage == 12) {
          use_stage = 0;
          use_parity = use_parity ^ 1;
        }
      }
      float* reductions = (float*)(arena + REDUCTIONS) + turn * 128;
      uint32_t row = warp * 16 + lane / 4;
      uint32_t first = lane % 4 * 2;
      if (first < 1) {
        uint32_t place = row + first;
        reductions[place] = sums[0][0];
        reductions[place + 8] = sums[0][2];
      }
      named_barrier(1, 256);
      if (warp == finisher) {
        uint32_t column = 0;
        uint32_t row_2 = lane % 16;
        uint32_t half = lane / 16;
        float half_sum = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 4; ++other) {
          uint32_t place = (half * 4 + other) * 16 + row_2;
          half_sum = half_sum + reductions[place + column];
        }
        float value_6 = shuffle_xor_f32(half_sum, 16);
        float row_sum = half_sum + value_6;
        float value_7 = row_sum * ((float*)(arena + SCALES))[column];
        float other = shuffle_xor_f32(value_7, 8);
        float gated = divide_f32(value_7, 1.0f + exp_f32(-value_7)) * other;
        float neighbour = shuffle_xor_f32(gated, 1);
        uint32_t pair = pack_bf16x2(gated, neighbour);
        if (lane < 8 && lane % 2 == 0) {
          publish_flagged(exchange_words + ((((strip * 8 + lane) / 32 + column) * 4 + (strip * 8 + lane) / 8 % 4) * 4 + (strip * 8 + lane) % 8 / 2 + 148640), pair, layer_epoch);
        }
      }
      turn = turn ^ 1;
      finisher = finisher + 1;
      if (finisher == 8) {
        finisher = 0;
      }
    }
  }
}

// projection onto the residual
__device__ __forceinline__ void down(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step, uint32_t layer,
    uint8_t* arena, uint32_t lane, uint64_t* exchange_words, uint32_t layer_epoch, uint64_t* full, uint32_t& use_stage,
    uint32_t& use_parity, uint8_t* ring, uint32_t warp, uint64_t* empty, uint32_t& turn, uint32_t& finisher) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + (layer * 5 + 4));
  }
  uint32_t position = block % 132;
  if (position < 256) {
    float sums[1][4] = {};
    float sums_2[1][4] = {};
    uint4* vector = (uint4*)(arena + VECTOR);
    uint32_t first_unit = thread;
    if (lane == 0) {
      uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 148640), layer_epoch);
    }
    warp_barrier();
    uint4 units[8];
    wait_flagged_units(units, exchange_words + (first_unit * 4 + 148640), 1024, 3, layer_epoch);
    #pragma unroll
    for (uint32_t number = 0; number < 3; ++number) {
      vector[first_unit + number * 256] = units[number];
    }
    named_barrier(1, 256);
    #pragma unroll 2
    for (uint32_t chunk = 0; chunk < 12; ++chunk) {
      mbarrier_wait(full + use_stage, use_parity);
      uint8_t* chunk_2 = ring + use_stage * 16384;
      uint4* vector_2 = (uint4*)(arena + VECTOR);
      const uint4* fragments = (const uint4*)(chunk_2);
      #pragma unroll
      for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
        uint32_t pair = turn_2 * 8 + warp;
        uint4 first = fragments[pair * 64 + lane];
        uint4 second = fragments[pair * 64 + 32 + lane];
        uint4* units_2 = vector_2 + (chunk * 16 + pair) * 4;
        uint4 values = units_2[lane % 4];
        mma_bf16(sums[0], first, values.x, values.y);
        mma_bf16(sums[0], second, values.z, values.w);
        wait_for_u32(first.x ^ second.x);
      }
      warp_barrier();
      if (lane == 0) {
        mbarrier_arrive(empty + use_stage);
      }
      use_stage = use_stage + 1;
      if (use_stage == 12) {
        use_stage = 0;
        use_parity = use_parity ^ 1;
      }
    }
    if (position + 132 < 256) {
      #pragma unroll 2
      for (uint32_t chunk = 0; chunk < 12; ++chunk) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk_2 = ring + use_stage * 16384;
        uint4* vector_2 = (uint4*)(arena + VECTOR);
        const uint4* fragments = (const uint4*)(chunk_2);
        #pragma unroll
        for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
          uint32_t pair = turn_2 * 8 + warp;
          uint4 first = fragments[pair * 64 + lane];
          uint4 second = fragments[pair * 64 + 32 + lane];
          uint4* units_2 = vector_2 + (chunk * 16 + pair) * 4;
          uint4 values = units_2[lane % 4];
          mma_bf16(sums_2[0], first, values.x, values.y);
          mma_bf16(sums_2[0], second, values.z, values.w);
          wait_for_u32(first.x ^ second.x);
        }
        warp_barrier();
        if (lane == 0) {
          mbarrier_arrive(empty + use_stage);
        }
        use_stage = use_stage + 1;
        if (use_stage == 12) {
          use_stage = 0;
          use_parity = use_parity ^ 1;
        }
      }
    }
    named_barrier(1, 256);
    uint4* vector_2 = (uint4*)(arena + VECTOR);
    uint32_t first_unit_2 = thread;
    if (lane == 0) {
      uint4 value = wait_flagged4(exchange_words + ((first_unit_2 + 768) * 4 + 148640), layer_epoch);
    }
    warp_barrier();
    uint4 units_2[8];
    wait_flagged_units(units_2, exchange_words + ((first_unit_2 + 768) * 4 + 148640), 1024, 3, layer_epoch);
    #pragma unroll
    for (uint32_t number = 0; number < 3; ++number) {
      vector_2[first_unit_2 + number * 256] = units_2[number];
    }
    named_barrier(1, 256);
    #pragma unroll 2
    for (uint32_t chunk = 12; chunk < 24; ++chunk) {
      mbarrier_wait(full + use_stage, use_parity);
      uint8_t* chunk_2 = ring + use_stage * 16384;
      uint4* vector_3 = (uint4*)(arena + VECTOR);
      const uint4* fragments = (const uint4*)(chunk_2);
      #pragma unroll
      for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
        uint32_t pair = turn_2 * 8 + warp;
        uint4 first = fragments[pair * 64 + lane];
        uint4 second = fragments[pair * 64 + 32 + lane];
        uint4* units_3 = vector_3 + ((chunk - 12) * 16 + pair) * 4;
        uint4 values = units_3[lane % 4];
        mma_bf16(sums[0], first, values.x, values.y);
        mma_bf16(sums[0], second, values.z, values.w);
        wait_for_u32(first.x ^ second.x);
      }
      warp_barrier();
      if (lane == 0) {
        mbarrier_arrive(empty + use_stage);
      }
      use_stage = use_stage + 1;
      if (use_stage == 12) {
        use_stage = 0;
        use_parity = use_parity ^ 1;
      }
    }
    if (position + 132 < 256) {
      #pragma unroll 2
      for (uint32_t chunk = 12; chunk < 24; ++chunk) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk_2 = ring + use_stage * 16384;
        uint4* vector_3 = (uint4*)(arena + VECTOR);
        const uint4* fragments = (const uint4*)(chunk_2);
        #pragma unroll
        for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
          uint32_t pair = turn_2 * 8 + warp;
          uint4 first = fragments[pair * 64 + lane];
          uint4 second = fragments[pair * 64 + 32 + lane];
          uint4* units_3 = vector_3 + ((chunk - 12) * 16 + pair) * 4;
          uint4 values = units_3[lane % 4];
          mma_bf16(sums_2[0], first, values.x, values.y);
          mma_bf16(sums_2[0], second, values.z, values.w);
          wait_for_u32(first.x ^ second.x);
        }
        warp_barrier();
        if (lane == 0) {
          mbarrier_arrive(empty + use_stage);
        }
        use_stage = use_stage + 1;
        if (use_stage == 12) {
          use_stage = 0;
          use_parity = use_parity ^ 1;
        }
      }
    }
    float* reductions = (float*)(arena + REDUCTIONS) + turn * 128;
    uint32_t row = warp * 16 + lane / 4;
    uint32_t first = lane % 4 * 2;
    if (first < 1) {
      uint32_t place = row + first;
      reductions[place] = sums[0][0];
      reductions[place + 8] = sums[0][2];
    }
    named_barrier(1, 256);
    if (warp == finisher) {
      uint32_t column = 0;
      uint32_t row_2 = lane % 16;
      uint32_t half = lane / 16;
      float half_sum = 0.0f;
      #pragma unroll
      for (uint32_t other = 0; other < 4; ++other) {
        uint32_t place = (half * 4 + other) * 16 + row_2;
        half_sum = half_sum + reductions[place + column];
      }
      float value = shuffle_xor_f32(half_sum, 16);
      float row_sum = half_sum + value;
      float* residual = (float*)(arena + RESIDUAL);
      float value_2 = row_sum;
      if (lane < 16) {
        uint32_t place = position / 132 * 16 + row_2 + column;
        value_2 = value_2 + residual[place];
        residual[place] = value_2;
      }
      float neighbour = shuffle_xor_f32(value_2, 1);
      uint32_t pair = pack_bf16x2(value_2, neighbour);
      if (lane < 16 && lane % 2 == 0) {
        publish_flagged(exchange_words + ((((position * 16 + lane) / 32 + column) * 4 + (position * 16 + lane) / 8 % 4) * 4 + (position * 16 + lane) % 8 / 2 + 32), pair, layer_epoch);
      }
    }
    turn = turn ^ 1;
    finisher = finisher + 1;
    if (finisher == 8) {
      finisher = 0;
    }
    if (position + 132 < 256) {
      float* reductions_2 = (float*)(arena + REDUCTIONS) + turn * 128;
      uint32_t row_2 = warp * 16 + lane / 4;
      uint32_t first_2 = lane % 4 * 2;
      if (first_2 < 1) {
        uint32_t place = row_2 + first_2;
        reductions_2[place] = sums_2[0][0];
        reductions_2[place + 8] = sums_2[0][2];
      }
      named_barrier(1, 256);
      if (warp == finisher) {
        uint32_t column = 0;
        uint32_t row_3 = lane % 16;
        uint32_t half = lane / 16;
        float half_sum = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 4; ++other) {
          uint32_t place = (half * 4 + other) * 16 + row_3;
          half_sum = half_sum + reductions_2[place + column];
        }
        float value = shuffle_xor_f32(half_sum, 16);
        float row_sum = half_sum + value;
        float* residual = (float*)(arena + RESIDUAL);
        float value_2 = row_sum;
        if (lane < 16) {
          uint32_t place = (position + 132) / 132 * 16 + row_3 + column;
          value_2 = value_2 + residual[place];
          residual[place] = value_2;
        }
        float neighbour = shuffle_xor_f32(value_2, 1);
        uint32_t pair = pack_bf16x2(value_2, neighbour);
        if (lane < 16 && lane % 2 == 0) {
          publish_flagged(exchange_words + (((((position + 132) * 16 + lane) / 32 + column) * 4 + ((position + 132) * 16 + lane) / 8 % 4) * 4 + ((position + 132) * 16 + lane) % 8 / 2 + 32), pair, layer_epoch);
        }
      }
      turn = turn ^ 1;
      finisher = finisher + 1;
      if (finisher == 8) {
        finisher = 0;
      }
    }
  }
}

// final norm, logits, candidates
__device__ __forceinline__ void head_2(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step,
    uint32_t head_from, float* logits, uint8_t* arena, const bf16* norms, uint32_t lane, uint64_t* exchange_words,
    uint32_t step_epoch, uint32_t warp, uint32_t column_count, uint64_t* full, uint32_t& use_stage,
    uint32_t& use_parity, uint8_t* ring, uint64_t* empty, uint32_t& turn, uint32_t& finisher, float& best,
    uint32_t& best_token) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + 180);
  }
  if (step >= head_from || logits != nullptr) {
    uint32_t position = (block + 8) % 132;
    if (position < 9496) {
      uint4* vector = (uint4*)(arena + VECTOR);
      float squares = 0.0f;
      uint32_t first_unit = thread;
      uint4 weights[8];
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        uint4 value = load_constant_u32x4(norms + 294912 + (first_unit + number * 256) * 8);
        weights[number] = value;
      }
      if (lane == 0) {
        uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 32), step_epoch + 35);
      }
      warp_barrier();
      uint4 units[8];
      wait_flagged_units(units, exchange_words + (first_unit * 4 + 32), 1024, 2, step_epoch + 35);
      #pragma unroll
      for (uint32_t number = 0; number < 2; ++number) {
        float low = bf16x2_low(units[number].x);
        float high = bf16x2_high(units[number].x);
        squares = squares + (low * low + high * high);
        uint32_t weights_2 = weights[number].x;
        float low_2 = bf16x2_low(units[number].y);
        float high_2 = bf16x2_high(units[number].y);
        squares = squares + (low_2 * low_2 + high_2 * high_2);
        uint32_t weights_3 = weights[number].y;
        float low_3 = bf16x2_low(units[number].z);
        float high_3 = bf16x2_high(units[number].z);
        squares = squares + (low_3 * low_3 + high_3 * high_3);
        uint32_t weights_4 = weights[number].z;
        float low_4 = bf16x2_low(units[number].w);
        float high_4 = bf16x2_high(units[number].w);
        squares = squares + (low_4 * low_4 + high_4 * high_4);
        uint32_t weights_5 = weights[number].w;
        vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_2), high * bf16x2_high(weights_2)), pack_bf16x2(low_2 * bf16x2_low(weights_3), high_2 * bf16x2_high(weights_3)), pack_bf16x2(low_3 * bf16x2_low(weights_4), high_3 * bf16x2_high(weights_4)), pack_bf16x2(low_4 * bf16x2_low(weights_5), high_4 * bf16x2_high(weights_5)));
      }
      float* partial_sums = (float*)(arena + PARTIAL_SUMS);
      float* scales = (float*)(arena + SCALES);
      float sum_of_token = squares;
      float value = shuffle_xor_f32(sum_of_token, 16);
      sum_of_token = sum_of_token + value;
      float value_2 = shuffle_xor_f32(sum_of_token, 8);
      sum_of_token = sum_of_token + value_2;
      float value_3 = shuffle_xor_f32(sum_of_token, 4);
      sum_of_token = sum_of_token + value_3;
      float value_4 = shuffle_xor_f32(sum_of_token, 2);
      sum_of_token = sum_of_token + value_4;
      float value_5 = shuffle_xor_f32(sum_of_token, 1);
      sum_of_token = sum_of_token + value_5;
      if (lane % 4 == 0 && lane < 4) {
        partial_sums[warp * 8 + lane / 4] = sum_of_token;
      }
      named_barrier(1, 256);
      if (thread < column_count) {
        float total = 0.0f;
        #pragma unroll
        for (uint32_t other = 0; other < 8; ++other) {
          uint32_t warp_2 = other + thread / 8;
          total = total + partial_sums[warp_2 * 8 + thread % 8];
        }
        scales[thread] = rsqrt_f32(total * 0.000244140625f + 1e-06f);
      }
      #pragma unroll 1
      for (uint32_t strip = position; strip < 9496; strip += 132) {
        float sums[1][4] = {};
        #pragma unroll 2
        for (uint32_t chunk = 0; chunk < 8; ++chunk) {
          mbarrier_wait(full + use_stage, use_parity);
          uint8_t* chunk_2 = ring + use_stage * 16384;
          uint4* vector_2 = (uint4*)(arena + VECTOR);
          const uint4* fragments = (const uint4*)(chunk_2);
          #pragma unroll
          for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
            uint32_t pair = turn_2 * 8 + warp;
            uint4 first = fragments[pair * 64 + lane];
            uint4 second = fragments[pair * 64 + 32 + lane];
            uint4* units_2 = vector_2 + (chunk * 16 + pair) * 4;
            uint4 values = units_2[lane % 4];
            mma_bf16(sums[0], first, values.x, values.y);
            mma_bf16(sums[0], second, values.z, values.w);
            wait_for_u32(first.x ^ second.x);
          }
          warp_barrier();
          if (lane == 0) {
            mbarrier_arrive(empty + use_stage);
          }
          use_stage = use_stage + 1;
          if (use_stage == 12) {
            use_stage = 0;
            use_parity = use_parity ^ 1;
          }
        }
        float* reductions = (float*)(arena + REDUCTIONS) + turn * 128;
        uint32_t row = warp * 16 + lane / 4;
        uint32_t first = lane % 4 * 2;
        if (first < 1) {
          uint32_t place = row + first;
          reductions[place] = sums[0][0];
          reductions[place + 8] = sums[0][2];
        }
        named_barrier(1, 256);
        if (warp == finisher) {
          uint32_t column = 0;
          uint32_t row_2 = lane % 16;
          uint32_t half = lane / 16;
          float half_sum = 0.0f;
          #pragma unroll
          for (uint32_t other = 0; other < 4; ++other) {
            uint32_t place = (half * 4 + other) * 16 + row_2;
            half_sum = half_sum + reductions[place + column];
          }
          float value_6 = shuffle_xor_f32(half_sum, 16);
          float row_sum = half_sum + value_6;
          float logit = row_sum * ((float*)(arena + SCALES))[column];
          uint32_t token = strip * 16 + row_2;
          if (logits != nullptr && lane < 16 && token < 151936) {
            uint64_t row_3 = (uint64_t)(step + column);
            logits[row_3 * 151936 + (uint64_t)(token)] = logit;
          }
          uint32_t token_2 = strip * 16 + row_2;
          float candidate = logit;
          float temperature = bits_float(((uint32_t*)(arena + COLUMNS))[column * 8 + 3]);
          if (temperature > 0.0f) {
            uint64_t seed = ((uint64_t)(((uint32_t*)(arena + COLUMNS))[column * 8 + 5]) << 32) | (uint64_t)(((uint32_t*)(arena + COLUMNS))[column * 8 + 4]);
            uint32_t position_2 = ((uint32_t*)(arena + COLUMNS))[column * 8] + 1;
            uint32_t c0 = token_2;
            uint32_t c1 = position_2;
            uint32_t c2 = 0;
            uint32_t c3 = 0;
            uint32_t k0 = (uint32_t)(seed);
            uint32_t k1 = (uint32_t)(seed >> 32);
            #pragma unroll
            for (uint32_t i = 0; i < 10; ++i) {
              uint32_t high0 = multiply_high_u32(3528531795u, c0);
              uint32_t high1 = multiply_high_u32(3449720151u, c2);
              uint32_t low0 = c0 * 3528531795u;
              uint32_t low1 = c2 * 3449720151u;
              c0 = high1 ^ c1 ^ k0;
              c1 = low1;
              c2 = high0 ^ c3 ^ k1;
              c3 = low0;
              k0 = k0 + 2654435769u;
              k1 = k1 + 3144134277u;
            }
            uint32_t word = c0;
            float uniform = ((float)(word >> 9) + 0.5f) * 1.1920929e-07f;
            float noise = -log_f32(-log_f32(uniform));
            candidate = divide_f32(logit, temperature) + noise;
          }
          if (token_2 < 151936 && candidate > best) {
            best = candidate;
            best_token = token_2;
          }
        }
        turn = turn ^ 1;
        finisher = finisher + 1;
        if (finisher == 8) {
          finisher = 0;
        }
      }
    }
  }
}

__device__ __forceinline__ void sampling(uint32_t thread, uint32_t* progress, uint32_t block, uint32_t step,
    uint8_t* arena, float& best, uint32_t& best_token, uint32_t lane, uint32_t warp, uint64_t* exchange_words,
    uint32_t step_epoch) {
  if (thread == 0) {
    store_relaxed_u32(progress + block, step * 182 + 181);
  }
  uint32_t first_word = step % 2 * 132 * 4;
  uint32_t* words = (uint32_t*)(arena + WARP_CANDIDATES);
  #pragma unroll 1
  for (uint32_t level = 0; level < 5; ++level) {
    uint32_t mask = 16u >> level;
    float other = shuffle_xor_f32(best, mask);
    uint32_t other_token = shuffle_xor_u32(best_token, mask);
    if (other > best || (other == best && other_token < best_token)) {
      best = other;
      best_token = other_token;
    }
  }
  if (lane == 0) {
    uint32_t place = warp * 2;
    words[place] = float_bits(best);
    words[place + 1] = best_token;
  }
  named_barrier(1, 256);
  if (warp < 1) {
    uint2* candidates = (uint2*)(arena + WARP_CANDIDATES);
    float best_2 = -bits_float(0x7f800000);
    uint32_t best_token_2 = 4294967295u;
    #pragma unroll 1
    for (uint32_t other = lane; other < 8; other += 32) {
      uint2 candidate = candidates[other + warp];
      if (bits_float(candidate.x) > best_2 || (bits_float(candidate.x) == best_2 && candidate.y < best_token_2)) {
        best_2 = bits_float(candidate.x);
        best_token_2 = candidate.y;
      }
    }
    #pragma unroll 1
    for (uint32_t level = 0; level < 5; ++level) {
      uint32_t mask = 16u >> level;
      float other = shuffle_xor_f32(best_2, mask);
      uint32_t other_token = shuffle_xor_u32(best_token_2, mask);
      if (other > best_2 || (other == best_2 && other_token < best_token_2)) {
        best_2 = other;
        best_token_2 = other_token;
      }
    }
    float best_3 = best_2;
    uint32_t best_token_3 = best_token_2;
    if (lane < 4) {
      uint32_t word = lane % 2 == 0 ? float_bits(best_3) : best_token_3;
      uint32_t place = first_word + (block * 2 + warp) * 2 + lane;
      publish_flagged_release(exchange_words + (place + 154784), word, step_epoch + 36);
    }
  }
  uint4* units = (uint4*)(arena + CANDIDATES);
  #pragma unroll 1
  for (uint32_t other = thread; other < 132; other += 256) {
    uint4 value = wait_flagged4_acquire(exchange_words + ((first_word / 4 + other) * 4 + 154784), step_epoch + 36);
    units[other] = value;
  }
  named_barrier(1, 256);
  uint32_t* chosen = (uint32_t*)(arena + CHOSEN);
  if (warp < 1) {
    uint2* candidates = (uint2*)(arena + CANDIDATES);
    float best_2 = -bits_float(0x7f800000);
    uint32_t best_token_2 = 4294967295u;
    #pragma unroll 1
    for (uint32_t other = lane; other < 132; other += 32) {
      uint2 candidate = candidates[other * 2 + warp];
      if (bits_float(candidate.x) > best_2 || (bits_float(candidate.x) == best_2 && candidate.y < best_token_2)) {
        best_2 = bits_float(candidate.x);
        best_token_2 = candidate.y;
      }
    }
    #pragma unroll 1
    for (uint32_t level = 0; level < 5; ++level) {
      uint32_t mask = 16u >> level;
      float other = shuffle_xor_f32(best_2, mask);
      uint32_t other_token = shuffle_xor_u32(best_token_2, mask);
      if (other > best_2 || (other == best_2 && other_token < best_token_2)) {
        best_2 = other;
        best_token_2 = other_token;
      }
    }
    float _ = best_2;
    uint32_t best_token_3 = best_token_2;
    if (lane == 0) {
      chosen[warp] = best_token_3;
    }
  }
  named_barrier(1, 256);
}

extern "C" __global__ void __launch_bounds__(384, 1) decode_step(const uint8_t* weights, const bf16* norms, const bf16* embedding, const float* rope, bf16* kv, const int32_t* page_table, const int32_t* kv_plans, const int32_t* tiles, const int32_t* sequences, const int32_t* columns, uint8_t* exchange, int32_t* tokens, const int32_t* stop_ids, float* logits, uint32_t* progress, int32_t* status, uint32_t steps, uint32_t head_from, uint32_t column_count, uint32_t plan_count, uint32_t epoch, const bf16* head_norms) {
  uint8_t* arena = shared_arena();
  uint32_t block = blockIdx.x;
  uint32_t thread = threadIdx.x;
  uint32_t warp = thread / 32;
  uint32_t lane = thread % 32;
  uint64_t* exchange_words = (uint64_t*)(exchange);
  uint64_t* full = (uint64_t*)(arena + RING_BARRIERS);
  uint64_t* empty = full + 12;
  uint8_t* ring = arena + RING;
  uint64_t* step_done = (uint64_t*)(arena + STEP_DONE);
  uint32_t* next_token = (uint32_t*)(arena + NEXT_TOKEN);
  if (thread == 0) {
    for (uint32_t stage = 0; stage < 12; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 8);
    }
    mbarrier_init(step_done, 1);
    mbarrier_init(step_done + 1, 1);
    mbarrier_fence_init();
  }
  if (thread < column_count) {
    uint32_t value = load_constant_u32(columns + thread * 4);
    uint32_t sequence = value;
    uint32_t value_2 = load_constant_u32(columns + (thread * 4 + 1));
    uint32_t number = value_2;
    uint32_t token = 0;
    uint32_t value_3 = load_constant_u32(sequences + (sequence * 16 + 2));
    if (number < value_3) {
      uint32_t place = sequence * 65 + number;
      token = (uint32_t)(tokens[place]) < 151935 ? (uint32_t)(tokens[place]) : 151935;
    }
    next_token[thread] = token;
    ((uint32_t*)(arena + COLUMNS))[thread * 8 + 7] = 0;
  }
  block_barrier();
  if (warp >= 8) {
    give_registers();
    // the copy warp: one lane walks the whole model's chunk list
    if (thread == 256) {
      uint32_t plan_index = 0;
      uint32_t fill_stage = 0;
      uint32_t fill_parity = 1;
      uint32_t landed_stage = 8;
      uint32_t landed_parity = 1;
      for (uint32_t step = 0; step < steps; ++step) {
        bool is_new = step == 0;
        uint32_t following = plan_index + 1;
        if (following < plan_count) {
          uint32_t first_step = load_constant_u32(kv_plans + following * 2880);
          if (first_step <= step) {
            plan_index = following;
            is_new = true;
          }
        }
        for (uint32_t layer = 0; layer < 36; ++layer) {
          uint64_t layer_offset = (uint64_t)(layer) * 385875968;
          // qkv
          uint32_t position = (block + 8) % 132;
          const uint8_t* matrix = weights + layer_offset;
          #pragma unroll 1
          for (uint32_t strip = position; strip < 384; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 17301504;
            uint32_t width = 132 - round / 2 * 12;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 8; ++chunk) {
              const uint8_t* source = matrix + (round_bytes + (uint64_t)(width * chunk * 16384 + position * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = ring + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // keys and values of earlier tokens
          if (layer == 0) {
            if (step > 0) {
              mbarrier_wait(step_done, (step + 1) % 2);
              fence_proxy_async();
              uint32_t stop = next_token[1];
              mbarrier_arrive(step_done + 1);
              if (stop != 0) {
                return;
              }
            }
          }
          uint32_t first_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 64)));
          uint32_t last_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 1 + 64)));
          #pragma unroll 1
          for (uint32_t number = first_item; number < last_item; ++number) {
            const int32_t* record = kv_plans + (plan_index * 2880 + (number * 8 + 256));
            uint4 what = load_constant_u32x4(record);
            uint4 rest = load_constant_u32x4(record + 4);
            const int32_t* record_2 = tiles + what.y * 8;
            uint4 place = load_constant_u32x4(record_2);
            uint4 keys = load_constant_u32x4(record_2 + 4);
            uint32_t end = rest.x < keys.x + keys.y * step ? rest.x : keys.x + keys.y * step;
            #pragma unroll 1
            for (uint32_t first = what.w; first < end; first += 32) {
              uint32_t count = end - first < 32 ? end - first : 32;
              uint32_t pages[2];
              #pragma unroll
              for (uint32_t number_2 = 0; number_2 < 2; ++number_2) {
                uint32_t token = first + number_2 * 16 < end - 1 ? first + number_2 * 16 : end - 1;
                uint32_t value = load_constant_u32(page_table + (place.z + token / 16));
                pages[number_2] = value;
              }
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = ring + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, count * 512);
              #pragma unroll
              for (uint32_t number_2 = 0; number_2 < 2; ++number_2) {
                if (number_2 * 16 < count) {
                  uint32_t run = count - number_2 * 16 < 16 ? count - number_2 * 16 : 16;
                  uint64_t offset = (uint64_t)(layer) * 16777216 + (uint64_t)(pages[number_2]) * 32768;
                  bf16* key = kv + (offset + (uint64_t)(what.z * 2048));
                  uint8_t* keys_2 = destination + number_2 * 16 * 256;
                  bulk_copy(keys_2, key, run * 256, barrier);
                  bulk_copy(keys_2 + 8192, key + 16384, run * 256, barrier);
                }
              }
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // o
          uint32_t position_2 = block % 132;
          uint64_t first_byte = layer_offset + 50331648;
          const uint8_t* matrix_2 = weights + first_byte;
          #pragma unroll 1
          for (uint32_t strip = position_2; strip < 256; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 17301504;
            uint32_t width = 132 - round * 8;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 8; ++chunk) {
              const uint8_t* source = matrix_2 + (round_bytes + (uint64_t)(width * chunk * 16384 + position_2 * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = ring + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // gate_up
          uint32_t position_3 = (block + 8) % 132;
          uint64_t first_byte_2 = layer_offset + 83886080;
          const uint8_t* matrix_3 = weights + first_byte_2;
          #pragma unroll 1
          for (uint32_t strip = position_3; strip < 1536; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 17301504;
            uint32_t width = 132 - round / 11 * 48;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 8; ++chunk) {
              const uint8_t* source = matrix_3 + (round_bytes + (uint64_t)(width * chunk * 16384 + position_3 * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = ring + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // down
          uint32_t position_4 = block % 132;
          uint64_t first_byte_3 = layer_offset + 285212672;
          const uint8_t* matrix_4 = weights + first_byte_3;
          #pragma unroll 1
          for (uint32_t slice = 0; slice < 2; ++slice) {
            uint32_t first = slice * 12;
            uint32_t end = first + 12 < 24 ? first + 12 : 24;
            #pragma unroll 1
            for (uint32_t strip = position_4; strip < 256; strip += 132) {
              uint32_t round = strip / 132;
              uint64_t round_bytes = (uint64_t)(round) * 51904512;
              uint32_t width = 132 - round * 8;
              #pragma unroll 1
              for (uint32_t chunk = first; chunk < end; ++chunk) {
                const uint8_t* source = matrix_4 + (round_bytes + (uint64_t)(width * chunk * 16384 + position_4 * 16384));
                mbarrier_wait(empty + fill_stage, fill_parity);
                mbarrier_wait(full + landed_stage, landed_parity);
                landed_stage = landed_stage + 1;
                if (landed_stage == 12) {
                  landed_stage = 0;
                  landed_parity = landed_parity ^ 1;
                }
                uint64_t* barrier = full + fill_stage;
                uint8_t* destination = ring + fill_stage * 16384;
                mbarrier_arrive_expect_tx(barrier, 16384);
                bulk_copy(destination, source, 16384, barrier);
                fill_stage = fill_stage + 1;
                if (fill_stage == 12) {
                  fill_stage = 0;
                  fill_parity = fill_parity ^ 1;
                }
              }
            }
          }
        }
        // head
        if (step >= head_from || logits != nullptr) {
          uint32_t position = (block + 8) % 132;
          const uint8_t* matrix = weights + 13891534848ull;
          #pragma unroll 1
          for (uint32_t strip = position; strip < 9496; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 17301504;
            uint32_t width = 132 - round / 71 * 8;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 8; ++chunk) {
              const uint8_t* source = matrix + (round_bytes + (uint64_t)(width * chunk * 16384 + position * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = ring + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
        }
        // sampling
      }
    }
  } else {
    take_registers();
    // the math warps
    uint32_t turn = 0;
    uint32_t finisher = 0;
    uint32_t plan_index = 0;
    uint32_t use_stage = 0;
    uint32_t use_parity = 0;
    for (uint32_t step = 0; step < steps; ++step) {
      bool is_new = step == 0;
      uint32_t following = plan_index + 1;
      if (following < plan_count) {
        uint32_t first_step = load_constant_u32(kv_plans + following * 2880);
        if (first_step <= step) {
          plan_index = following;
          is_new = true;
        }
      }
      bool has_new_plan = is_new;
      uint32_t step_epoch = epoch + step * 37;
      uint32_t* state = (uint32_t*)(arena + COLUMNS);
      if (thread < column_count) {
        uint32_t value = load_constant_u32(columns + thread * 4);
        uint32_t sequence = value;
        uint32_t value_2 = load_constant_u32(sequences + (sequence * 16 + 1));
        uint32_t value_3 = load_constant_u32(columns + (thread * 4 + 1));
        uint32_t number = step * value_2 + value_3;
        uint32_t* words = state + thread * 8;
        uint32_t value_4 = load_constant_u32(sequences + sequence * 16);
        uint32_t position = value_4 + number < 8191 ? value_4 + number : 8191;
        words[0] = position;
        words[1] = number;
        uint32_t value_5 = load_constant_u32(sequences + (sequence * 16 + 3));
        words[2] = value_5;
        uint32_t value_6 = load_constant_u32(sequences + (sequence * 16 + 5));
        words[3] = value_6;
        uint32_t value_7 = load_constant_u32(sequences + (sequence * 16 + 6));
        words[4] = value_7;
        uint32_t value_8 = load_constant_u32(sequences + (sequence * 16 + 7));
        words[5] = value_8;
        words[6] = sequence;
      }
      if (has_new_plan) {
        uint4* kept = (uint4*)(arena + RECORDS);
        uint4 header = load_constant_u32x4(kv_plans + plan_index * 2880);
        if (thread < 4) {
          uint32_t first_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 64)));
          uint32_t last_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 1 + 64)));
          if (thread == 0) {
            kept[0] = make_u32x4(first_item, last_item, header.z * header.w, header.w);
          }
          if (first_item + thread < last_item) {
            const int32_t* record = kv_plans + (plan_index * 2880 + ((first_item + thread) * 8 + 256));
            uint4 what = load_constant_u32x4(record);
            (kept + (1 + thread * 4))[0] = what;
            uint4 value = load_constant_u32x4(record + 4);
            (kept + (1 + thread * 4))[1] = value;
            const int32_t* record_2 = tiles + what.y * 8;
            uint4 value_2 = load_constant_u32x4(record_2);
            (kept + (1 + thread * 4) + 2)[0] = value_2;
            uint4 value_3 = load_constant_u32x4(record_2 + 4);
            (kept + (1 + thread * 4) + 2)[1] = value_3;
          }
        }
        if (warp % 4 == 0 && warp / 4 * 132 + block < header.z * header.w) {
          uint4* place = (uint4*)(arena + RECORDS) + (21 + warp / 4 * 8);
          uint32_t number = load_constant_u32(kv_plans + (plan_index * 2880 + ((warp / 4 * 132 + block) / header.w * 2 + 2496)));
          uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + ((warp / 4 * 132 + block) / header.w * 2 + 1 + 2496)));
          uint32_t begin = load_constant_u32(kv_plans + (plan_index * 2880 + ((warp / 4 * 132 + block) / header.w + 2432)));
          uint32_t end = load_constant_u32(kv_plans + (plan_index * 2880 + ((warp / 4 * 132 + block) / header.w + 1 + 2432)));
          if (lane == 0) {
            place[0] = make_u32x4(head, (warp / 4 * 132 + block) % header.w, begin, end);
            const int32_t* record = tiles + number * 8;
            uint4 value = load_constant_u32x4(record);
            (place + 1)[0] = value;
            uint4 value_2 = load_constant_u32x4(record + 4);
            (place + 1)[1] = value_2;
          }
          uint32_t* sources = (uint32_t*)(place + 3);
          if (lane < (end - begin < 20 ? end - begin : 20)) {
            uint32_t value = load_constant_u32(kv_plans + (plan_index * 2880 + (begin + lane + 2560)));
            sources[lane] = value;
          }
        }
      }
      named_barrier(1, 256);
      float* angles = (float*)(arena + ROPE);
      #pragma unroll 1
      for (uint32_t number = thread; number < column_count * 128; number += 256) {
        uint32_t position = ((uint32_t*)(arena + COLUMNS))[number / 128 * 8];
        angles[number] = rope[(uint64_t)(position) * 128 + (uint64_t)(number % 128)];
      }
      float* residual = (float*)(arena + RESIDUAL);
      #pragma unroll 1
      for (uint32_t place = thread; place < 32; place += 256) {
        uint32_t strip = place / 16 * 132 + block % 132;
        uint32_t row = strip * 16 + place % 16;
        if (row < 4096 && 0 < column_count) {
          residual[place] = bf16_to_f32((embedding + (uint64_t)(next_token[0]) * 4096)[row]);
        } else {
          residual[place] = 0.0f;
        }
      }
      named_barrier(1, 256);
      for (uint32_t layer = 0; layer < 36; ++layer) {
        uint32_t layer_epoch = step_epoch + layer;
        qkv(thread, progress, block, step, layer, norms, head_norms, arena, embedding, next_token, lane, warp,
            column_count, exchange_words, layer_epoch, full, use_stage, use_parity, ring, empty, turn, finisher);
        attention(thread, progress, block, step, layer, arena, kv_plans, plan_index, tiles, warp, lane, head_norms,
            exchange_words, layer_epoch, page_table, kv, use_stage, full, use_parity, ring, empty);
        o(thread, progress, block, step, layer, arena, lane, exchange_words, layer_epoch, full, use_stage, use_parity,
            ring, warp, empty, turn, finisher);
        gate_up(thread, progress, block, step, layer, norms, arena, lane, exchange_words, layer_epoch, warp,
            column_count, full, use_stage, use_parity, ring, empty, turn, finisher);
        down(thread, progress, block, step, layer, arena, lane, exchange_words, layer_epoch, full, use_stage,
            use_parity, ring, warp, empty, turn, finisher);
      }
      float best = -bits_float(0x7f800000);
      uint32_t best_token = 4294967295u;
      head_2(thread, progress, block, step, head_from, logits, arena, norms, lane, exchange_words, step_epoch, warp,
          column_count, full, use_stage, use_parity, ring, empty, turn, finisher, best, best_token);
      sampling(thread, progress, block, step, arena, best, best_token, lane, warp, exchange_words, step_epoch);
      // the next tokens, and whether the launch ends
      if (warp == 0) {
        uint32_t going_on = 0;
        #pragma unroll 1
        for (uint32_t column = lane; column < column_count; column += 32) {
          uint32_t sequence = ((uint32_t*)(arena + COLUMNS))[column * 8 + 6];
          uint32_t number = ((uint32_t*)(arena + COLUMNS))[column * 8 + 1];
          uint32_t total = ((uint32_t*)(arena + COLUMNS))[column * 8 + 2];
          uint32_t value = load_constant_u32(sequences + (sequence * 16 + 2));
          uint32_t given = value;
          uint32_t value_2 = load_constant_u32(sequences + (sequence * 16 + 1));
          uint32_t per_step = value_2;
          uint32_t sampled = ((uint32_t*)(arena + CHOSEN))[column];
          uint32_t stopped = ((uint32_t*)(arena + COLUMNS))[column * 8 + 7];
          if (number + 1 >= given && number < total) {
            if (block == 0) {
              tokens[sequence * 65 + number + 1] = (int32_t)(sampled);
            }
            uint32_t value_3 = load_constant_u32(sequences + (sequence * 16 + 8));
            uint32_t first_stop = value_3;
            uint32_t value_4 = load_constant_u32(sequences + (sequence * 16 + 9));
            #pragma unroll 1
            for (uint32_t stop = 0; stop < value_4; ++stop) {
              if ((uint32_t)(stop_ids[first_stop + stop]) == sampled) {
                stopped = 1;
              }
            }
          }
          uint32_t following_2 = number + per_step;
          if (following_2 >= total) {
            stopped = 1;
          }
          ((uint32_t*)(arena + COLUMNS))[column * 8 + 7] = stopped;
          if (stopped == 0) {
            going_on = 1;
          }
          if (following_2 >= given && per_step == 1) {
            next_token[column] = sampled < 151935 ? sampled : 151935;
          } else {
            uint32_t token = 0;
            uint32_t value_3 = load_constant_u32(sequences + (sequence * 16 + 2));
            if (following_2 < value_3) {
              uint32_t place = sequence * 65 + following_2;
              token = (uint32_t)(tokens[place]) < 151935 ? (uint32_t)(tokens[place]) : 151935;
            }
            next_token[column] = token;
          }
        }
        #pragma unroll 1
        for (uint32_t level = 0; level < 5; ++level) {
          uint32_t value = shuffle_xor_u32(going_on, 16u >> level);
          going_on = going_on | value;
        }
        warp_barrier();
        if (thread == 0) {
          if (block == 0) {
            status[0] = (int32_t)(step + 1);
          }
          mbarrier_wait(step_done + 1, (step + 1) % 2);
          next_token[1] = going_on == 0 ? 1u : 0u;
          fence_proxy_async();
          mbarrier_arrive(step_done);
        }
      }
      named_barrier(1, 256);
      if (next_token[1] != 0) {
        // the copy lane has fetched what it does not need the tokens for: use it up
        if (step + 1 < steps) {
          #pragma unroll 1
          for (uint32_t i = (block + 8) % 132; i < 384; i += 132) {
            #pragma unroll 1
            for (uint32_t i_2 = 0; i_2 < 8; ++i_2) {
              mbarrier_wait(full + use_stage, use_parity);
              uint8_t* chunk = ring + use_stage * 16384;
              warp_barrier();
              if (lane == 0) {
                mbarrier_arrive(empty + use_stage);
              }
              use_stage = use_stage + 1;
              if (use_stage == 12) {
                use_stage = 0;
                use_parity = use_parity ^ 1;
              }
            }
          }
        }
        break;
      }
    }
  }
}
