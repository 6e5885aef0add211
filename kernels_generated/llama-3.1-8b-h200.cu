// The whole decode step of a Llama model in one persistent kernel. Generated; do not edit.
// Regenerate with: cheetah generate llama-3.1-8b
//
// model: hidden 4096, ffn 14336, vocab 128256, heads 32, kv_heads 8, head_dim 128, layers 32
// machine: h200, 132 blocks of 384 threads: 8 consumer warps
// plan: consumer_warps 8, stage_bytes 16384, stages 12, in_flight 4, in_flight_waiting 3, adding_warps 3, sync flags, page_size 16, max_context 8192, batch 1, tokens 1, down_slices 2, max_steps 64, kv_chunk 0, kv_dtype bf16, drafts 0, by_numbers 0
// weights read a step: 15009316864 bytes, in 436207616 a layer
// shared memory: 225416 bytes of 232448, scratch 26624 from 196864 on

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

__device__ __forceinline__ void block_barrier() { __syncthreads(); }

__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void keep_104_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 104;"); }
__device__ __forceinline__ void take_200_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 200;"); }

__device__ __forceinline__ void wait_for_u32(uint32_t value) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fc0dead; @p nanosleep.u32 1;}" :: "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t renewed_u32(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

__device__ __forceinline__ float shuffle_xor_f32(float value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t shuffle_xor_u32(uint32_t value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t shuffle_u32(uint32_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ float warp_sum_f32(float value) {
  #pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value = value + __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

__device__ __forceinline__ uint32_t warp_maximum_u32(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ uint32_t warp_sum_u32(uint32_t value) { return __reduce_add_sync(0xffffffffu, value); }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void store_shared_u32(uint32_t* place, uint32_t value) {
  asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" :: "r"(shared_address(place)), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_u32(const uint32_t* place) {
  uint32_t result;
  asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(result) : "r"(shared_address(place)) : "memory");
  return result;
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

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

__device__ __forceinline__ void ask_flagged4(uint64_t (&asked)[4], const uint64_t* words) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
    : "=l"(asked[0]), "=l"(asked[1]) : "l"(words) : "memory");
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
    : "=l"(asked[2]), "=l"(asked[3]) : "l"(words + 2) : "memory");
}

__device__ __forceinline__ uint4 settle_flagged4(uint64_t (&asked)[4], const uint64_t* words, uint32_t epoch) {
  while ((uint32_t)(asked[0] >> 32) != epoch || (uint32_t)(asked[1] >> 32) != epoch ||
         (uint32_t)(asked[2] >> 32) != epoch || (uint32_t)(asked[3] >> 32) != epoch) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
      : "=l"(asked[0]), "=l"(asked[1]) : "l"(words) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
      : "=l"(asked[2]), "=l"(asked[3]) : "l"(words + 2) : "memory");
  }
  return make_uint4((uint32_t)asked[0], (uint32_t)asked[1], (uint32_t)asked[2], (uint32_t)asked[3]);
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

__device__ __forceinline__ void publish_tagged(uint32_t* place, uint32_t data, uint32_t exponent, uint32_t epoch) {
  const uint32_t number = epoch % 3 + 1, tag = (number & 1) << 14 | (number & 2) << 29;
  const uint32_t factor = (127 - exponent << 7) * 0x00010001;
  uint32_t word;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(data), "r"(factor));
  uint32_t too_large = (word >> 14 & 0x00010001) * 0xFFFF;
  word = word & ~too_large | too_large & 0x3FFF3FFF | tag;
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(word) : "memory");
}

__device__ __forceinline__ uint4 wait_tagged4(const uint32_t* words, uint32_t exponent, uint32_t epoch) {
  const uint32_t number = epoch % 3 + 1, tag = (number & 1) << 14 | (number & 2) << 29;
  const uint32_t factor = (127 + exponent << 7) * 0x00010001;
  uint32_t word[4];
  do {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(words) : "memory");
    for (uint32_t j = 0; j < 4; ++j) word[j] ^= tag;
  } while ((word[0] | word[1] | word[2] | word[3]) & 0x40004000);
  for (uint32_t j = 0; j < 4; ++j)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word[j]) : "r"(word[j]), "r"(factor));
  return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void wait_tagged_units(uint4 (&data)[8], const uint32_t* words, uint32_t stride, uint32_t count, uint32_t exponent, uint32_t epoch) {
  const uint32_t number = epoch % 3 + 1, tag = (number & 1) << 14 | (number & 2) << 29;
  const uint32_t factor = (127 + exponent << 7) * 0x00010001;
  uint32_t word[8][4];
  uint32_t missing;
  do {
    missing = 0;
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i][2]), "=r"(word[i][3])
          : "l"(words + i * stride) : "memory");
      }
    }
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        #pragma unroll
        for (uint32_t j = 0; j < 4; ++j) missing |= word[i][j] ^= tag;
      }
    }
  } while (missing & 0x40004000);
  #pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if (i < count) {
      #pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(word[i][j]) : "r"(word[i][j]), "r"(factor));
      data[i] = make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]);
    }
  }
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

__device__ __forceinline__ uint32_t float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float bits_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000); }
__device__ __forceinline__ float bf16_to_f32(bf16 value) { return __uint_as_float((uint32_t)value.bits << 16); }

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

__device__ __forceinline__ uint32_t multiply_high_u32(uint32_t a, uint32_t b) { return __umulhi(a, b); }
__device__ __forceinline__ float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ __forceinline__ float exp2_f32(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float exp_f32(float value) { return __expf(value); }
__device__ __forceinline__ float log_f32(float value) { return logf(value); }
__device__ __forceinline__ float rsqrt_f32(float value) { return rsqrtf(value); }
__device__ __forceinline__ float divide_f32(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float maximum_f32(float a, float b) { return fmaxf(a, b); }

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

__device__ __forceinline__ uint32_t load_relaxed_u32_sys(const uint32_t* place) {
  uint32_t result;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(result) : "l"(place) : "memory");
  return result;
}

__device__ __forceinline__ void store_relaxed_u32_sys(uint32_t* place, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(place), "r"(value) : "memory");
}
#endif

constexpr uint32_t RING = 0;  // 196608 bytes
constexpr uint32_t RING_BARRIERS = 196608;  // 192 bytes
constexpr uint32_t BLOCK_WAITS = 196800;  // 4 bytes
constexpr uint32_t VECTOR = 196864;  // 14336 bytes of scratch
constexpr uint32_t CANDIDATES = 196864;  // 2112 bytes of scratch
constexpr uint32_t LISTED = 196864;  // 8448 bytes of scratch
constexpr uint32_t LIST_ROWS = 205312;  // 1152 bytes of scratch
constexpr uint32_t FILTERS = 206464;  // 64 bytes of scratch
constexpr uint32_t FILTER_SUMS = 206592;  // 1024 bytes of scratch
constexpr uint32_t ATTENTION = 196864;  // 16384 bytes of scratch
constexpr uint32_t QUERIES = 213248;  // 2048 bytes of scratch
constexpr uint32_t NEWEST = 215296;  // 8192 bytes of scratch
constexpr uint32_t REDUCTIONS = 211200;  // 1920 bytes of scratch
constexpr uint32_t REDUCTION_BARRIERS = 223488;  // 64 bytes
constexpr uint32_t RESIDUAL = 223552;  // 128 bytes
constexpr uint32_t ROPE = 223680;  // 512 bytes
constexpr uint32_t STATISTICS = 224192;  // 512 bytes
constexpr uint32_t RECORDS = 224704;  // 592 bytes
constexpr uint32_t WARP_CANDIDATES = 225296;  // 24 bytes
constexpr uint32_t COLUMNS = 225328;  // 36 bytes
constexpr uint32_t CHOSEN = 225376;  // 4 bytes
constexpr uint32_t STEP_DONE = 225392;  // 16 bytes
constexpr uint32_t NEXT_TOKEN = 225408;  // 8 bytes
constexpr uint32_t LAUNCH_TOKENS = 64;
constexpr uint32_t VOCAB = 128256;
constexpr uint32_t PLAN_WORDS = 2880;
constexpr uint32_t BLOCKS = 132;
constexpr uint32_t STAGE_BYTES = 16384;
constexpr uint32_t PLAN_WORK_INDPTR = 64;
constexpr uint32_t PLAN_ITEMS = 256;
constexpr uint32_t STAGE_KEYS = 32;
constexpr uint32_t PAGE_SIZE = 16;
constexpr uint32_t HEAD_DIM = 128;
constexpr uint32_t TO_VALUES = 16384;
constexpr uint32_t VALUES_AT = 8192;
constexpr uint32_t O_ROWS = 4096;
constexpr uint32_t NAN_BITS = 0x7fc00000;
constexpr uint32_t WARP_SUMS = 20;
constexpr uint32_t EXCHANGE_QKV = 37376;
constexpr uint32_t EXCHANGE_HIDDEN_SQUARES = 179840;
constexpr uint32_t MAX_CONTEXT = 8192;
constexpr uint32_t QKV_START = 8;
constexpr uint32_t QKV_ROWS = 6144;
constexpr uint32_t PART_WORDS = 1024;
constexpr uint32_t EXCHANGE_MIDDLE_SQUARES = 180096;
constexpr uint32_t GATE_UP_START = 8;
constexpr uint32_t GATE_UP_ROWS = 28672;
constexpr uint32_t PROMPT_TOKEN = 0x80000000u;
constexpr uint32_t MASK_WORDS = 4008;
constexpr uint32_t PHILOX_MULTIPLIER_0 = 0xd2511f53u;
constexpr uint32_t PHILOX_MULTIPLIER_1 = 0xcd9e8d57u;
constexpr uint32_t PHILOX_WEYL_0 = 0x9e3779b9u;
constexpr uint32_t PHILOX_WEYL_1 = 0xbb67ae85u;
constexpr uint32_t LM_HEAD_START = 8;
constexpr uint32_t LM_HEAD_ROWS = 128256;
constexpr uint32_t PLAN_MERGES = 2496;
constexpr uint32_t PLAN_MERGE_INDPTR = 2432;
constexpr uint32_t PLAN_MERGE_SRC = 2560;
constexpr uint32_t WAVE_VALUES = 16;
constexpr uint32_t CONSUMERS = 256;
constexpr uint32_t HIDDEN = 4096;
constexpr uint32_t BF16_TILE_BYTES = 1024;
constexpr uint32_t UNITS_OF_32_COLUMNS = 4;
constexpr uint32_t PHASES = 162;
constexpr uint32_t PROJECTED_ROWS = 6144;
constexpr uint32_t QUOTIENTS_OF_8 = 0x11112248;
constexpr uint32_t LOW_HALVES = 0x5410;
constexpr uint32_t HIGH_HALVES = 0x7632;
constexpr uint32_t NEVER = 0x08000000;
constexpr uint32_t SLICE_PAIRS = 32;
constexpr uint32_t EXCHANGE_PARTIALS = 40448;
constexpr uint32_t WRITE_THROUGH = 0xffffffffu;
constexpr uint32_t EXCHANGE_ATTENTION = 1024;
constexpr uint32_t TEAM_THREADS = 128;
constexpr uint32_t HEAD_LIMIT = 65536;
constexpr uint32_t LINE_BYTES = 128;
constexpr uint32_t DOWN_SLICE_UNITS = 896;
constexpr uint32_t DOWN_ROWS = 4096;
constexpr uint32_t PHASE_LM_HEAD = 160;
constexpr uint32_t NO_TOKEN = 0xffffffffu;
constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t ALL_BITS = 0xffffffffu;
constexpr uint32_t OWN_ROWS = 976;
constexpr uint32_t COLUMN_LANES = 256;
constexpr uint32_t LIST_ROW_WORDS = 36;
constexpr uint32_t EXCHANGE_SHORT_LISTS = 181408;
constexpr uint32_t EXCHANGE_CANDIDATES = 180352;
constexpr uint32_t UNDECIDED = 0xffffffffu;
constexpr uint32_t AS_IT_IS = 0xfffffffdu;
constexpr uint32_t LEFT_OPEN = 0xfffffffeu;
constexpr uint32_t EXCHANGE_FILTERS = 189856;
constexpr uint32_t CANCELLED_TOKEN = 0xfffffffeu;
constexpr uint32_t PHASE_SAMPLING = 161;
constexpr uint32_t LAYER_BYTES = 436207616;
constexpr uint32_t STEP_EPOCHS = 99;

struct Matrix {
  uint64_t offset;
  uint32_t m_tiles, start, waves, last_wave_width, wave_bytes, chunks, slices, slice_chunks, chunk_bytes,
      last_chunk_bytes;
};

struct TileRecord {
  uint32_t first_column, columns, table, offset, length, stride, newest, newest_column;
};

struct ItemRecord {
  uint32_t level, tile, head, begin, end, partial, rows, unused;
};

struct KeptItem {
  ItemRecord item;
  TileRecord tile;
};

struct Exchanged {
  uint32_t offset, apart, exponent;
};

struct KeptMerge {
  uint32_t head_and_chunk, row, begin, end;
  TileRecord tile;
  uint32_t sources[20];
};

struct Nearest {
  float first, first_noisy;
  uint32_t first_token;
  float second, second_noisy;
  uint32_t second_token;
  float left_out, weight, best;
  uint32_t best_token;
  float best_scaled;
};

struct SequenceRecord {
  uint32_t length, per_step, given, total, first_column, temperature, seed_low, seed_high, stop_first, stop_count,
      options, slot, top_k, top_p, reach, repetition, presence, frequency, drafted, ngram_min, ngram_max, unused_0,
      unused_1, unused_2;
};

struct ColumnRecord {
  uint32_t sequence, number, unused_0, unused_1;
};

struct ColumnState {
  uint32_t position, number, total, temperature, seed_low, seed_high, sequence, stopped, cancelled;
};

struct KeptPlan {
  uint32_t first_item, last_item, jobs, jobs_of_head;
  KeptItem items[5];
  KeptMerge merges[2];
};

struct FilterState {
  uint32_t filtered, open, chosen, has_candidate;
  float highest, limit, below, above, least, most;
  float tested[6];
};

__device__ constexpr Exchanged EXCHANGED_HIDDEN = {0, 3, 32};
__device__ constexpr Matrix QKV = {0, 384, 8, 3, 120, 17301504, 8, 1, 8, 16384, 16384};
__device__ constexpr Matrix O = {50331648, 256, 0, 2, 124, 17301504, 8, 1, 8, 16384, 16384};
__device__ constexpr Exchanged EXCHANGED_ATTENTION = {1024, 1, 60};
__device__ constexpr Exchanged EXCHANGED_MIDDLE = {5120, 1, 32};
__device__ constexpr Matrix GATE_UP = {83886080, 1792, 8, 14, 76, 17301504, 8, 1, 8, 16384, 16384};
__device__ constexpr Exchanged EXCHANGED_GATED = {12288, 10, 60};
__device__ constexpr Matrix DOWN = {318767104, 256, 0, 2, 124, 60555264, 28, 2, 14, 16384, 16384};
__device__ constexpr Matrix LM_HEAD = {13958643712, 8016, 8, 61, 96, 17301504, 8, 1, 8, 16384, 16384};

struct DecodeStep {
  const uint8_t* weights;
  const bf16* norms;
  const bf16* embedding;
  const float* rope;
  bf16* kv;
  const int32_t* page_table;
  uint32_t kv_pages;
  const int32_t* kv_plans;
  const int32_t* tiles;
  const int32_t* sequences;
  const int32_t* columns;
  uint8_t* exchange;
  int32_t* tokens;
  uint32_t* emitted;
  const uint32_t* cancelled;
  const int32_t* stop_ids;
  const uint32_t* masks;
  const float* logit_bias;
  uint32_t* token_counts;
  float* weighed;
  float* logits;
  uint32_t* progress;
  int32_t* status;
  uint32_t steps, head_from, column_count, plan_count, options, epoch;
  const SequenceRecord* sequence_records;
  const ColumnRecord* column_records;
  uint8_t* arena;
  uint32_t* chosen_tokens;
  FilterState* filter_states;
  KeptPlan* kept_plans;
  ColumnState* column_states;
  uint32_t block, thread, warp, lane;
  uint64_t* exchange_words;
  uint32_t* input_words;
  uint64_t* full;
  uint64_t* empty;
  uint8_t* ring;
  uint32_t* block_waits;
  uint64_t* summed;
  uint64_t* taken;
  uint64_t* step_added;
  uint64_t* loaded;
  uint64_t* step_done;
  uint32_t* next_token;
  uint32_t plan_index, fill_stage, fill_parity, landed_stage, landed_parity, under_way, adding, adding_parity,
      loaded_parity, turn, turn_parity, use_stage, use_parity;

  // By one thread: set all barriers up. A block barrier must follow before anyone uses them.
  __device__ __forceinline__ void initialise() {
    for (uint32_t stage = 0; stage < 12; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 8);
    }
    store_shared_u32(block_waits, 0);
    for (uint32_t reduction = 0; reduction < 3; ++reduction) {
      mbarrier_init(summed + reduction, 8);
      mbarrier_init(taken + reduction, 1);
    }
    mbarrier_init(step_added, 3);
    mbarrier_init(loaded, 4);
    mbarrier_init(step_done, 1);
    mbarrier_init(step_done + 1, 4);
    mbarrier_fence_init();
  }

  // An input of a sequence, or 0 where it has none left.
  __device__ __forceinline__ uint32_t given(uint32_t sequence, uint32_t index) {
    uint32_t token = 0;
    if (index < load_constant_u32(&sequence_records[sequence].given)) {
      uint32_t place = sequence * (LAUNCH_TOKENS + 1) + index;
      token = min((uint32_t)(tokens[place]), VOCAB - 1);
    }
    return token;
  }

  // The first token of every column. A block barrier must follow.
  __device__ __forceinline__ void take_first() {
    if (thread < column_count) {
      uint32_t sequence = load_constant_u32(&column_records[thread].sequence);
      uint32_t index = load_constant_u32(&column_records[thread].number);
      next_token[thread] = given(sequence, index);
      column_states[thread].stopped = 0;
      column_states[thread].cancelled = 0;
    }
  }

  // Move on to the next plan if it begins in this step. Whether it is not the plan of the step before.
  __device__ __forceinline__ bool follow_plan(uint32_t& plan_index, uint32_t step) {
    bool is_new = step == 0;
    uint32_t following = plan_index + 1;
    if (following < plan_count) {
      uint32_t first_step = load_constant_u32(kv_plans + following * PLAN_WORDS);
      if (first_step <= step) {
        plan_index = following;
        is_new = true;
      }
    }
    return is_new;
  }

  // The next stage of the ring; behind the last comes the first, in the next pass.
  __device__ __forceinline__ void advance(uint32_t& stage, uint32_t& parity, uint32_t stages) {
    stage += 1;
    if (stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // In the producer role: let chunks land until one more may be requested.
  __device__ __forceinline__ void bound_all_requests(uint32_t most) {
    #pragma unroll 1
    for (uint32_t i = most; i < under_way + 1; ++i) {
      mbarrier_wait(full + landed_stage, landed_parity);
      advance(landed_stage, landed_parity, 12);
    }
    under_way = min(under_way + 1, most);
  }

  // The same where fewer are allowed while the block waits.
  __device__ __forceinline__ void bound_requests(uint32_t while_waiting, uint32_t allowed) {
    uint32_t waits = load_shared_u32(block_waits);
    bound_all_requests(waits != 0 ? while_waiting : allowed);
  }

  // The block's M-tiles of a matrix, chunk by chunk, into the stages of the ring.
  __device__ __forceinline__ void fetch(Matrix matrix, uint64_t layer_offset) {
    uint32_t position = (block + matrix.start) % BLOCKS;
    const uint8_t* first_byte = weights + (layer_offset + matrix.offset);
    #pragma unroll 1
    for (uint32_t slice = 0; slice < matrix.slices; ++slice) {
      uint32_t first = slice * matrix.slice_chunks;
      uint32_t end = min(first + matrix.slice_chunks, matrix.chunks);
      #pragma unroll 1
      for (uint32_t m_tile = position; m_tile < matrix.m_tiles; m_tile += BLOCKS) {
        uint32_t wave = m_tile / BLOCKS;
        uint64_t wave_bytes = (uint64_t)(wave) * (uint64_t)(matrix.wave_bytes);
        uint32_t width = wave + 1 == matrix.waves ? matrix.last_wave_width : BLOCKS;
        #pragma unroll 1
        for (uint32_t chunk = first; chunk < end; ++chunk) {
          uint32_t chunk_bytes = chunk + 1 == matrix.chunks ? matrix.last_chunk_bytes : matrix.chunk_bytes;
          const uint8_t* source = first_byte + (wave_bytes + (uint64_t)(width * chunk * matrix.chunk_bytes + position * (chunk + 1 == matrix.chunks ? matrix.last_chunk_bytes : matrix.chunk_bytes)));
          mbarrier_wait(empty + fill_stage, fill_parity);
          bound_requests(3, 4);
          uint64_t* barrier = full + fill_stage;
          uint8_t* destination = ring + fill_stage * STAGE_BYTES;
          mbarrier_arrive_expect_tx(barrier, chunk_bytes);
          bulk_copy(destination, source, chunk_bytes, barrier);
          advance(fill_stage, fill_parity, 12);
        }
      }
    }
  }

  // In the producer role: wait for the end of the last step, and see whether it was the launch's last.
  __device__ __forceinline__ bool launch_is_over(uint32_t step) {
    mbarrier_wait(step_done, (step + 1) % 2);
    fence_proxy_async();
    uint32_t stop = next_token[1];
    mbarrier_arrive(step_done + 1);
    return stop != 0;
  }

  // A tile's record, in two units of 16 bytes.
  __device__ __forceinline__ void keep_tile(TileRecord* place, uint32_t index) {
    const int32_t* record = tiles + index * 8;
    uint4* units = (uint4*)(place);
    units[0] = load_constant_u32x4(record);
    units[1] = load_constant_u32x4(record + 4);
  }

  // An item's record and its tile's, in four units of 16 bytes, to a place of shared memory or in registers.
  __device__ __forceinline__ void keep_item(KeptItem* place, const int32_t* record) {
    uint4 what = load_constant_u32x4(record);
    uint32_t tile = what.y;
    uint4* units = (uint4*)(place);
    units[0] = what;
    units[1] = load_constant_u32x4(record + 4);
    keep_tile(&place->tile, tile);
  }

  // The cached keys and values of this block's items, one item after the other.
  __device__ __forceinline__ void copy_items(uint32_t layer, uint32_t step) {
    uint32_t first_item = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (block + PLAN_WORK_INDPTR)));
    uint32_t last_item = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (block + 1 + PLAN_WORK_INDPTR)));
    #pragma unroll 1
    for (uint32_t index = first_item; index < last_item; ++index) {
      uint4 units[4];
      KeptItem* record = (KeptItem*)(&units[0]);
      keep_item(record, kv_plans + (plan_index * PLAN_WORDS + (index * 8 + PLAN_ITEMS)));
      uint32_t kv_head = record->item.head;
      uint32_t begin = record->item.begin;
      uint32_t end = min(record->item.end, record->tile.length + record->tile.stride * step);
      #pragma unroll 1
      for (uint32_t first = begin; first < end; first += STAGE_KEYS) {
        uint32_t count = min(end - first, STAGE_KEYS);
        uint32_t pages[STAGE_KEYS / PAGE_SIZE];
        #pragma unroll
        for (uint32_t index_2 = 0; index_2 < STAGE_KEYS / PAGE_SIZE; ++index_2) {
          uint32_t token = min(first + index_2 * PAGE_SIZE, end - 1);
          pages[index_2] = load_constant_u32(page_table + (record->tile.table + token / PAGE_SIZE));
        }
        mbarrier_wait(empty + fill_stage, fill_parity);
        bound_requests(3, 4);
        uint64_t* barrier = full + fill_stage;
        uint8_t* destination = ring + fill_stage * STAGE_BYTES;
        mbarrier_arrive_expect_tx(barrier, count * (2 * HEAD_DIM * 2));
        #pragma unroll
        for (uint32_t index_2 = 0; index_2 < STAGE_KEYS / PAGE_SIZE; ++index_2) {
          if (index_2 * PAGE_SIZE < count) {
            uint32_t run = min(count - index_2 * PAGE_SIZE, PAGE_SIZE);
            uint64_t offset = (uint64_t)(layer * kv_pages + pages[index_2]) * (2 * TO_VALUES);
            bf16* key = kv + (offset + (uint64_t)(kv_head * (PAGE_SIZE * HEAD_DIM)));
            uint8_t* keys = destination + index_2 * PAGE_SIZE * (HEAD_DIM * 2);
            bulk_copy(keys, key, run * (HEAD_DIM * 2), barrier);
            bulk_copy(keys + VALUES_AT, key + TO_VALUES, run * (HEAD_DIM * 2), barrier);
          }
        }
        advance(fill_stage, fill_parity, 12);
      }
    }
  }

  // A share of a column's sum of squares (f32), that of lane `lane` of so many.
  __device__ __forceinline__ float sum_of_lane(uint32_t lane, uint32_t vector, uint32_t epoch) {
    float total = 0.0f;
    #pragma unroll 1
    for (uint32_t first = lane; first < O_ROWS / 16 / 4 + lane; first += 64) {
      uint32_t places[8];
      uint4 data[8];
      #pragma unroll
      for (uint32_t index = 0; index < 2; ++index) {
        uint32_t unit = min(first + index * 32, O_ROWS / 16 / 4 - 1);
        places[index] = unit * 4;
      }
      wait_flagged_places(data, exchange_words + vector, places, 2, epoch);
      #pragma unroll
      for (uint32_t index = 0; index < 2; ++index) {
        uint4 words = data[index];
        float low = bits_float(words.x) + bits_float(words.y);
        float of_unit = low + (bits_float(words.z) + bits_float(words.w));
        total += first + index * 32 < O_ROWS / 16 / 4 ? of_unit : 0.0f;
      }
    }
    return total;
  }

  // 1 / rms of a column's vector, of the squares that all blocks made of it; NaN where it was implausible.
  __device__ __forceinline__ float inverse_rms(uint32_t vector, uint32_t epoch) {
    float total = 0.0f;
    total = sum_of_lane(lane, vector, epoch);
    total = warp_sum_f32(total);
    float mean = fma_f32(total, 0.000244140625f, 1e-05f);
    float scale = rsqrt_f32(mean);
    return total < 1.8446744e+19f ? scale : bits_float(NAN_BITS);
  }

  // The scale of a column, once the block has its input, unless it is known.
  __device__ __forceinline__ void learn_scale(float& scale, uint32_t vector, uint32_t epoch) {
    if (scale == 0.0f) {
      mbarrier_wait(loaded, loaded_parity);
      scale = inverse_rms(vector, epoch);
    }
  }

  // Add the warps' sums: of the first half of the warps and of the second half, each in order, then both. The
  // `first` time for an M-tile, wait for them.
  __device__ __forceinline__ float sum_of_row() {
    float* reduction = (float*)(arena + REDUCTIONS) + adding * (WARP_SUMS * 8);
    float* own = reduction + (lane / 16 * (WARP_SUMS * 4) + lane % 16);
    mbarrier_wait(summed + adding, adding_parity);
    float total = 0.0f;
    #pragma unroll
    for (uint32_t other = 0; other < 4; ++other) total += own[other * WARP_SUMS];
    float total_2 = total;
    return total_2 + shuffle_xor_f32(total_2, 16);
  }

  // RoPE (rotate-half): the pair (k, k + D/2) lies 8 lanes apart. Returns the rotated value.
  __device__ __forceinline__ float rotate(float value, uint32_t m_tile_of_head, uint32_t row) {
    float2* angles = (float2*)(arena + ROPE);
    uint32_t frequency = m_tile_of_head * 8 + row % 8;
    float2 angle = angles[frequency];
    float partner = shuffle_xor_f32(value, 8);
    bool is_second = row >= 8;
    return fma_f32(value, angle.x, (is_second ? partner : -partner) * angle.y);
  }

  // The rows of a slot, with what of it is worked out before the sums are there.
  __device__ __forceinline__ void finish_rows(uint32_t m_tile, float& scale, uint32_t layer_epoch, uint32_t layer) {
    uint32_t row = lane % 16;
    bool is_own = lane < 16;
    uint32_t head = m_tile / 8;
    uint32_t m_tile_of_head = m_tile % 8;
    uint32_t paired = m_tile_of_head * 8 + row % 8 + (row >= 8 ? 64u : 0u);
    bool is_paired = head < 40;
    uint32_t dim = is_paired ? paired : m_tile_of_head * 16 + row;
    uint32_t place = (head * HEAD_DIM + dim) / 2;
    uint32_t published = renewed_u32(place + EXCHANGE_QKV);
    learn_scale(scale, EXCHANGE_HIDDEN_SQUARES, layer_epoch - 1);
    float total = sum_of_row();
    float value = total * scale;
    if (head < 40) value = rotate(value, m_tile_of_head, row);
    float neighbour = shuffle_xor_f32(value, 1);
    uint32_t pair = pack_bf16x2(value, neighbour);
    if (is_own && row % 2 == 0) {
      publish_flagged(exchange_words + published, pair, layer_epoch);
      if (head >= 32 && column_states[0].number < column_states[0].total) {
        uint32_t table = column_states[0].sequence * (MAX_CONTEXT / PAGE_SIZE);
        uint32_t page = load_constant_u32(page_table + (table + column_states[0].position / PAGE_SIZE));
        uint64_t offset = (uint64_t)(layer * kv_pages + page) * (2 * TO_VALUES);
        bf16* key = kv + (offset + (uint64_t)((head - 32) % 8 * (PAGE_SIZE * HEAD_DIM) + column_states[0].position % PAGE_SIZE * HEAD_DIM));
        bf16* place_2 = head - 32 < 8 ? key : key + TO_VALUES;
        ((uint32_t*)(place_2 + dim))[0] = pair;
        fence_proxy_async();
      }
    }
  }

  // The block's M-tiles of qkv: the warps' sums added up, the rows finished.
  __device__ __forceinline__ void finish_qkv(uint32_t layer_epoch, uint32_t layer) {
    uint32_t position = (block + QKV_START) % BLOCKS;
    warp_barrier();
    if (lane == 0) mbarrier_arrive(loaded);
    float scale = 0.0f;
    #pragma unroll 1
    for (uint32_t m_tile = position; m_tile < QKV_ROWS / 16; m_tile += BLOCKS) {
      if (adding == warp - 9) {
        finish_rows(m_tile, scale, layer_epoch, layer);
        warp_barrier();
        if (lane == 0) mbarrier_arrive(taken + adding);
      }
      advance(adding, adding_parity, 3);
    }
    mbarrier_wait(loaded, loaded_parity);
    loaded_parity ^= 1;
  }

  // The number in the workspace of payload word `index` of a vector (EXCHANGED) whose parts lie apart.
  __device__ __forceinline__ uint32_t word_of_input(Exchanged vector, uint32_t index) {
    return index / PART_WORDS * (vector.apart * PART_WORDS) + index % PART_WORDS + vector.offset;
  }

  // The sum of the squares of an M-tile's rows, or NaN where one was published as what it is not.
  __device__ __forceinline__ void publish_squares(float value, float published, uint32_t row, bool is_own,
      uint32_t place, uint32_t vector, uint32_t epoch) {
    bool is_plausible = published < 8589934592.0f && published > -8589934592.0f;
    float told = is_plausible ? value : bits_float(NAN_BITS);
    float total = told * told;
    total += shuffle_xor_f32(total, 8);
    total += shuffle_xor_f32(total, 4);
    total += shuffle_xor_f32(total, 2);
    total += shuffle_xor_f32(total, 1);
    if (is_own && row == 0) publish_flagged(exchange_words + (place + vector), float_bits(total), epoch);
  }

  // The rows of a slot, with what of it is worked out before the sums are there.
  __device__ __forceinline__ void finish_rows_of_o(uint32_t m_tile, const bf16* weights, Exchanged vector,
      uint32_t squares, uint32_t epoch) {
    uint32_t row = lane % 16;
    bool is_own = lane < 16;
    float* residual = (float*)(arena + RESIDUAL);
    uint32_t place = renewed_u32(m_tile / BLOCKS * 16 + row);
    float weight = bf16_to_f32(weights[m_tile * 16 + row]);
    uint32_t published = renewed_u32(word_of_input(vector, ((m_tile * 16 + row) / 32 * 4 + (m_tile * 16 + row) / 8 % 4) * 4 + (m_tile * 16 + row) % 8 / 2));
    float total = sum_of_row();
    float value = total;
    if (is_own) {
      value += residual[place];
      residual[place] = value;
    }
    float weighted = value * weight;
    float neighbour = shuffle_xor_f32(weighted, 1);
    uint32_t pair = pack_bf16x2(weighted, neighbour);
    if (is_own && row < 16 && row % 2 == 0) publish_tagged(input_words + published, pair, vector.exponent, epoch);
    publish_squares(value, weighted, row, is_own, m_tile, squares, epoch);
  }

  // The block's M-tiles of a matrix: the warps' sums added up, the rows finished.
  __device__ __forceinline__ void finish_matrix(Matrix matrix, const bf16* weights, Exchanged vector, uint32_t squares,
      uint32_t epoch) {
    uint32_t position = (block + matrix.start) % BLOCKS;
    #pragma unroll 1
    for (uint32_t m_tile = position; m_tile < matrix.m_tiles; m_tile += BLOCKS) {
      if (adding == warp - 9) {
        finish_rows_of_o(m_tile, weights, vector, squares, epoch);
        warp_barrier();
        if (lane == 0) mbarrier_arrive(taken + adding);
      }
      advance(adding, adding_parity, 3);
    }
  }

  // The rows of a slot, with what of it is worked out before the sums are there.
  __device__ __forceinline__ void finish_rows_of_gate_up(uint32_t m_tile, float& scale, uint32_t layer_epoch) {
    uint32_t row = lane % 16;
    bool is_own = lane < 16;
    uint32_t published = renewed_u32(word_of_input(EXCHANGED_GATED, ((m_tile * 8 + row) / 32 * 4 + (m_tile * 8 + row) / 8 % 4) * 4 + (m_tile * 8 + row) % 8 / 2));
    learn_scale(scale, EXCHANGE_MIDDLE_SQUARES, layer_epoch);
    float total = sum_of_row();
    float value = total * scale;
    float other = shuffle_xor_f32(value, 8);
    float gated = divide_f32(value, 1.0f + exp_f32(-value)) * other;
    float neighbour = shuffle_xor_f32(gated, 1);
    uint32_t pair = pack_bf16x2(gated, neighbour);
    if (is_own && row < 8 && row % 2 == 0) publish_tagged(input_words + published, pair, 60, layer_epoch);
  }

  // The block's M-tiles of gate_up: the warps' sums added up, the rows finished.
  __device__ __forceinline__ void finish_gate_up(uint32_t layer_epoch) {
    uint32_t position = (block + GATE_UP_START) % BLOCKS;
    warp_barrier();
    if (lane == 0) mbarrier_arrive(loaded);
    float scale = 0.0f;
    #pragma unroll 1
    for (uint32_t m_tile = position; m_tile < GATE_UP_ROWS / 16; m_tile += BLOCKS) {
      if (adding == warp - 9) {
        finish_rows_of_gate_up(m_tile, scale, layer_epoch);
        warp_barrier();
        if (lane == 0) mbarrier_arrive(taken + adding);
      }
      advance(adding, adding_parity, 3);
    }
    mbarrier_wait(loaded, loaded_parity);
    loaded_parity ^= 1;
  }

  __device__ __forceinline__ void penalise(uint32_t token, float& adjusted) {
    uint32_t value = load_constant_u32(&sequence_records[column_states[0].sequence].slot);
    uint32_t found = token_counts[value * VOCAB + token];
    uint32_t count = found & (PROMPT_TOKEN - 1);
    if (found != 0) {
      float repetition = bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].repetition));
      float quotient = divide_f32(adjusted, repetition);
      adjusted = adjusted > 0.0f ? quotient : adjusted * repetition;
    }
    if (count != 0) {
      adjusted -= bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].frequency)) * (float)(count);
      adjusted -= bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].presence));
    }
  }

  // The logit of a token below the vocabulary's end, as its column's sequence wants it.
  __device__ __forceinline__ float adjust(uint32_t token, float logit) {
    uint32_t options = load_constant_u32(&sequence_records[column_states[0].sequence].options);
    float adjusted = logit;
    if ((options & 1) != 0) {
      uint32_t place = load_constant_u32(&sequence_records[column_states[0].sequence].slot) * MASK_WORDS + token / 32;
      if (((load_constant_u32(masks + place) >> token % 32) & 1) == 0) adjusted = -infinity();
    }
    if ((options & 2) != 0) {
      adjusted += bits_float(load_constant_u32(logit_bias + (load_constant_u32(&sequence_records[column_states[0].sequence].slot) * VOCAB + token)));
    }
    if ((options & 4) != 0) penalise(token, adjusted);
    return adjusted;
  }

  // -log(-log u), u = ((word >> 9) + 0.5) / 2^23: exact in f32, and never 0 or 1.
  __device__ __forceinline__ float gumbel(uint32_t token, uint32_t position, uint64_t seed) {
    uint32_t c0 = token;
    uint32_t c1 = position;
    uint32_t c2 = 0;
    uint32_t c3 = 0;
    uint32_t k0 = (uint32_t)(seed);
    uint32_t k1 = (uint32_t)(seed >> 32);
    #pragma unroll
    for (uint32_t i = 0; i < 10; ++i) {
      uint32_t high0 = multiply_high_u32(PHILOX_MULTIPLIER_0, c0);
      uint32_t high1 = multiply_high_u32(PHILOX_MULTIPLIER_1, c2);
      uint32_t low0 = c0 * PHILOX_MULTIPLIER_0;
      uint32_t low1 = c2 * PHILOX_MULTIPLIER_1;
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
      k0 += PHILOX_WEYL_0;
      k1 += PHILOX_WEYL_1;
    }
    uint32_t word = c0;
    float uniform = ((float)(word >> 9) + 0.5f) * 1.1920929e-07f;
    return -log_f32(-log_f32(uniform));
  }

  // Write a logit down, as it is compared without filters: one row a lane, in the adder role.
  __device__ __forceinline__ void keep_weighed(uint32_t token, float scaled, float noisy) {
    bool is_filtered = (load_constant_u32(&sequence_records[column_states[0].sequence].options) & 8) != 0;
    if (is_filtered) {
      uint32_t following = column_states[0].number + 1;
      uint32_t value = load_constant_u32(&sequence_records[column_states[0].sequence].given);
      bool wanted = following >= value && following <= column_states[0].total;
      if (wanted && column_states[0].stopped == 0) {
        uint32_t place = (load_constant_u32(&sequence_records[column_states[0].sequence].slot) * VOCAB + token) * 2;
        weighed[place] = scaled;
        weighed[place + 1] = noisy;
      }
    }
  }

  // In the adder role, by lanes that own a row: take an M-tile's logits in. A lane sees ascending ids, so `>`
  // keeps the lowest on ties.
  __device__ __forceinline__ void consider(float logit, uint32_t m_tile, uint32_t row, float& best,
      uint32_t& best_token) {
    uint32_t token = m_tile * 16 + row;
    float candidate = logit;
    if ((options & 7) != 0 && token < VOCAB) candidate = adjust(token, candidate);
    float temperature = bits_float(column_states[0].temperature);
    if (temperature > 0.0f) {
      uint64_t seed = ((uint64_t)(column_states[0].seed_high) << 32) | (uint64_t)(column_states[0].seed_low);
      uint32_t position = column_states[0].position + 1;
      float scaled = divide_f32(candidate, temperature);
      candidate = scaled + gumbel(token, position, seed);
      if ((options & 8) != 0 && token < VOCAB) keep_weighed(token, scaled, candidate);
    }
    if (token < VOCAB && candidate > best) {
      best = candidate;
      best_token = token;
    }
  }

  // The rows of a slot, with what of it is worked out before the sums are there.
  __device__ __forceinline__ void finish_rows_of_lm_head(uint32_t m_tile, float& scale, uint32_t step_epoch,
      uint32_t step, float& best, uint32_t& best_token) {
    uint32_t row = lane % 16;
    bool is_own = lane < 16;
    learn_scale(scale, EXCHANGE_HIDDEN_SQUARES, step_epoch + 32);
    float total = sum_of_row();
    float logit = total * scale;
    uint32_t token = m_tile * 16 + row;
    if (is_own) {
      if (logits != nullptr && token < VOCAB) {
        uint64_t row_2 = (uint64_t)(step);
        logits[row_2 * VOCAB + (uint64_t)(token)] = logit;
      }
      consider(logit, m_tile, row, best, best_token);
    }
  }

  // The block's M-tiles of lm_head: the warps' sums added up, the rows finished.
  __device__ __forceinline__ void finish_lm_head(uint32_t step_epoch, uint32_t step, float& best,
      uint32_t& best_token) {
    uint32_t position = (block + LM_HEAD_START) % BLOCKS;
    warp_barrier();
    if (lane == 0) mbarrier_arrive(loaded);
    float scale = 0.0f;
    #pragma unroll 1
    for (uint32_t m_tile = position; m_tile < LM_HEAD_ROWS / 16; m_tile += BLOCKS) {
      if (adding == warp - 9) {
        finish_rows_of_lm_head(m_tile, scale, step_epoch, step, best, best_token);
        warp_barrier();
        if (lane == 0) mbarrier_arrive(taken + adding);
      }
      advance(adding, adding_parity, 3);
    }
    mbarrier_wait(loaded, loaded_parity);
    loaded_parity ^= 1;
  }

  // The best candidate of 2^levels neighbouring lanes, on all of them; the lowest id on ties.
  __device__ __forceinline__ void best_of_levels(float& best, uint32_t& best_token, uint32_t levels) {
    #pragma unroll 1
    for (uint32_t level = 0; level < levels; ++level) {
      uint32_t mask = 1u << (levels - 1 - level);
      float other = shuffle_xor_f32(best, mask);
      uint32_t other_token = shuffle_xor_u32(best_token, mask);
      if (other > best || (other == best && other_token < best_token)) {
        best = other;
        best_token = other_token;
      }
    }
  }

  __device__ __forceinline__ void lay_down_candidates(float& best, uint32_t& best_token) {
    uint32_t* words = (uint32_t*)(arena + WARP_CANDIDATES);
    best_of_levels(best, best_token, 4);
    if (lane == 0) {
      uint32_t place = (warp - 9) * 2;
      words[place] = float_bits(best);
      words[place + 1] = best_token;
    }
    warp_barrier();
    if (lane == 0) mbarrier_arrive(step_added);
  }

  // Write down every column's place in this step. A barrier of the consumer warps must follow.
  __device__ __forceinline__ void begin_step(uint32_t step) {
    if (thread < column_count) {
      uint32_t sequence = load_constant_u32(&column_records[thread].sequence);
      uint32_t per_step = load_constant_u32(&sequence_records[sequence].per_step);
      uint32_t index = step * per_step + load_constant_u32(&column_records[thread].number);
      uint32_t position = load_constant_u32(&sequence_records[sequence].length) + index;
      column_states[thread].position = min(position, MAX_CONTEXT - 1);
      column_states[thread].number = index;
      column_states[thread].total = load_constant_u32(&sequence_records[sequence].total);
      column_states[thread].temperature = load_constant_u32(&sequence_records[sequence].temperature);
      column_states[thread].seed_low = load_constant_u32(&sequence_records[sequence].seed_low);
      column_states[thread].seed_high = load_constant_u32(&sequence_records[sequence].seed_high);
      column_states[thread].sequence = sequence;
    }
  }

  // Called by a whole warp of the team.
  __device__ __forceinline__ void keep_merge(uint32_t job, uint32_t merge_rows, uint32_t warp, uint32_t lane) {
    KeptMerge* merge = &kept_plans[0].merges[warp / 4];
    uint32_t index = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (job / merge_rows * 2 + PLAN_MERGES)));
    uint32_t head = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (job / merge_rows * 2 + 1 + PLAN_MERGES)));
    uint32_t begin = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (job / merge_rows + PLAN_MERGE_INDPTR)));
    uint32_t end = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (job / merge_rows + 1 + PLAN_MERGE_INDPTR)));
    if (lane == 0) {
      ((uint4*)(merge))[0] = make_u32x4(head, job % merge_rows, begin, end);
      keep_tile(&merge->tile, index);
    }
    if (lane < min(end - begin, 20u)) {
      merge->sources[lane] = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (begin + lane + PLAN_MERGE_SRC)));
    }
  }

  // In the consumer role: bring the records of the present plan to shared memory. A barrier of the consumer warps
  // must precede, if there were others, and follow.
  __device__ __forceinline__ void keep_plan() {
    uint4 header = load_constant_u32x4(kv_plans + plan_index * PLAN_WORDS);
    if (thread < 4) {
      uint32_t first_item = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (block + PLAN_WORK_INDPTR)));
      uint32_t last_item = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (block + 1 + PLAN_WORK_INDPTR)));
      if (thread == 0) {
        kept_plans[0].first_item = first_item;
        kept_plans[0].last_item = last_item;
        kept_plans[0].jobs = header.z * header.w;
        kept_plans[0].jobs_of_head = header.w;
      }
      if (first_item + thread < last_item) {
        const int32_t* record = kv_plans + (plan_index * PLAN_WORDS + ((first_item + thread) * 8 + PLAN_ITEMS));
        keep_item(&kept_plans[0].items[thread], record);
      }
    }
    if (warp % 4 == 0 && warp / 4 * BLOCKS + block < header.z * header.w) {
      keep_merge(warp / 4 * BLOCKS + block, header.w, warp, lane);
    }
  }

  // In the consumer role: the embeddings of the step's tokens, times the multiplier, become the residual, and are
  // published as every hidden vector is. A lane has a row of a column, of the block's M-tiles in turn; whole warps
  // share M-tiles.
  __device__ __forceinline__ void publish_embeddings(uint32_t step_epoch) {
    #pragma unroll 1
    for (uint32_t place = thread; place < 2 * WAVE_VALUES; place += CONSUMERS) {
      uint32_t wave = place / WAVE_VALUES;
      uint32_t row = place % 16;
      uint32_t m_tile = wave * BLOCKS + block % BLOCKS;
      bool is_own = place < 2 * WAVE_VALUES && m_tile < O_ROWS / 16 && 0 < column_count;
      uint32_t there = min(m_tile, O_ROWS / 16 - 1);
      float* residual = (float*)(arena + RESIDUAL);
      uint32_t place_2 = renewed_u32(wave * 16 + row);
      float weight = bf16_to_f32(norms[there * 16 + row]);
      uint32_t published = renewed_u32(word_of_input(EXCHANGED_HIDDEN, ((there * 16 + row) / 32 * 4 + (there * 16 + row) / 8 % 4) * 4 + (there * 16 + row) % 8 / 2));
      float embedded = 0.0f;
      if (is_own) embedded = bf16_to_f32((embedding + (uint64_t)(next_token[0]) * HIDDEN)[there * 16 + row]);
      float value = embedded;
      if (is_own) residual[place_2] = value;
      float weighted = value * weight;
      float neighbour = shuffle_xor_f32(weighted, 1);
      uint32_t pair = pack_bf16x2(weighted, neighbour);
      if (is_own && row < 16 && row % 2 == 0) publish_tagged(input_words + published, pair, 32, step_epoch);
      publish_squares(value, weighted, row, is_own, there, EXCHANGE_HIDDEN_SQUARES, step_epoch);
    }
  }

  // cos and sin of every column's position.
  __device__ __forceinline__ void load_angles() {
    float* angles = (float*)(arena + ROPE);
    #pragma unroll 1
    for (uint32_t index = thread; index < column_count * HEAD_DIM; index += CONSUMERS) {
      uint32_t position = column_states[index / HEAD_DIM].position;
      angles[index] = rope[(uint64_t)(position) * HEAD_DIM + (uint64_t)(index % HEAD_DIM)];
    }
  }

  // The phases of the launch that this block has begun before, for the host.
  __device__ __forceinline__ void note_progress(uint32_t so_far) {
    if (thread == 0) store_relaxed_u32(progress + block, so_far);
  }

  // Bring a part of a vector into shared memory; ends with a barrier of the consumer warps.
  __device__ __forceinline__ void load_vector(uint32_t first_unit, Exchanged vector, uint32_t epoch) {
    uint4* vector_2 = (uint4*)(arena + VECTOR);
    if (lane == 0) wait_tagged4(input_words + word_of_input(vector, (thread + first_unit) * 4), vector.exponent, epoch);
    warp_barrier();
    uint4 units[8];
    wait_tagged_units(units, input_words + word_of_input(vector, (thread + first_unit) * 4), vector.apart * (CONSUMERS * 4), HIDDEN / 8 / CONSUMERS, vector.exponent, epoch);
    #pragma unroll
    for (uint32_t index = 0; index < HIDDEN / 8 / CONSUMERS; ++index) {
      vector_2[thread + index * CONSUMERS] = units[index];
    }
    named_barrier(1, CONSUMERS);
  }

  // This warp's tiles of a chunk, and what they are multiplied with, to registers.
  __device__ __forceinline__ void hold_chunk(uint32_t place, uint8_t* chunk,
      uint4 (&weights)[STAGE_BYTES / BF16_TILE_BYTES / 8][2], uint4 (&values)[STAGE_BYTES / BF16_TILE_BYTES / 8]) {
    const uint4* fragments = (const uint4*)(chunk);
    uint32_t read = 0;
    #pragma unroll
    for (uint32_t turn = 0; turn < STAGE_BYTES / BF16_TILE_BYTES / 8; ++turn) {
      uint32_t pair = turn * 8 + warp;
      uint4 first = fragments[pair * 64 + lane];
      uint4 second = fragments[pair * 64 + 32 + lane];
      weights[turn][0] = first;
      weights[turn][1] = second;
      values[turn] = ((uint4*)(arena + VECTOR) + (place * (STAGE_BYTES / BF16_TILE_BYTES) + pair) * UNITS_OF_32_COLUMNS)[lane % 4];
      read ^= first.x ^ second.x;
    }
    wait_for_u32(read);
  }

  // The products of what `hold_chunk` brought.
  __device__ __forceinline__ void multiply_held(float (&sums)[1][4],
      uint4 (&weights)[STAGE_BYTES / BF16_TILE_BYTES / 8][2], uint4 (&values)[STAGE_BYTES / BF16_TILE_BYTES / 8]) {
    #pragma unroll
    for (uint32_t turn = 0; turn < STAGE_BYTES / BF16_TILE_BYTES / 8; ++turn) {
      uint32_t pair = turn * 8 + warp;
      mma_bf16(sums[0], weights[turn][0], values[turn].x, values[turn].y);
      mma_bf16(sums[0], weights[turn][1], values[turn].z, values[turn].w);
    }
  }

  // Chunks [first, end) of an M-tile in the next stages, by the part of the input that lies beside them.
  __device__ __forceinline__ void use_chunks(uint32_t first, uint32_t end, float (&sums)[1][4]) {
    #pragma unroll 2
    for (uint32_t chunk = first; chunk < end; ++chunk) {
      uint4 weights[STAGE_BYTES / BF16_TILE_BYTES / 8][2];
      uint4 values[STAGE_BYTES / BF16_TILE_BYTES / 8];
      mbarrier_wait(full + use_stage, use_parity);
      uint8_t* chunk_2 = ring + use_stage * STAGE_BYTES;
      hold_chunk(chunk - first, chunk_2, weights, values);
      warp_barrier();
      if (lane == 0) mbarrier_arrive(empty + use_stage);
      advance(use_stage, use_parity, 12);
      multiply_held(sums, weights, values);
    }
  }

  // This warp's sums: [warp][pair of columns][column of the pair][row]. Lane 4g + t holds rows g and g + 8 of
  // columns 2t and 2t + 1.
  __device__ __forceinline__ void lay_sums_down(float* reduction, float (&sums)[1][4]) {
    uint32_t own = warp * WARP_SUMS + lane / 4;
    uint32_t pair = lane % 4;
    if (pair < 1) {
      uint32_t place = own + pair * 40;
      reduction[place] = sums[0][0];
      reduction[place + 8] = sums[0][2];
    }
  }

  // The end of an M-tile: this warp's sums to the adding warps.
  __device__ __forceinline__ void hand_over(float (&sums)[1][4]) {
    mbarrier_wait(taken + turn, turn_parity ^ 1);
    float* reduction = (float*)(arena + REDUCTIONS) + turn * (WARP_SUMS * 8);
    lay_sums_down(reduction, sums);
    warp_barrier();
    if (lane == 0) mbarrier_arrive(summed + turn);
    advance(turn, turn_parity, 3);
  }

  // The block's M-tiles of a matrix by vectors that are there whole.
  __device__ __forceinline__ void multiply_m_tiles(Matrix matrix) {
    #pragma unroll 1
    for (uint32_t m_tile = (block + matrix.start) % BLOCKS; m_tile < matrix.m_tiles; m_tile += BLOCKS) {
      float sums[1][4] = {};
      if (m_tile + BLOCKS >= matrix.m_tiles && thread == 0) store_shared_u32(block_waits, 1);
      use_chunks(0, matrix.chunks, sums);
      hand_over(sums);
    }
  }

  // What was handed over so far is added up and finished: the last M-tile of every reduction, oldest first.
  __device__ __forceinline__ void wait_until_taken() {
    #pragma unroll 1
    for (uint32_t i = 0; i < 3; ++i) {
      mbarrier_wait(taken + turn, turn_parity ^ 1);
      advance(turn, turn_parity, 3);
    }
    turn_parity ^= 1;
  }

  // ---- phase qkv -------------------------------------------------------------------------------------
  // Norm; q, k, v; rotary embedding; keys and values into the cache.
  // Waits for: hidden, hidden_squares.
  // Makes: qkv.
  __device__ __forceinline__ void qkv(uint32_t step, uint32_t layer, uint32_t layer_epoch) {
    note_progress(step * PHASES + layer * 5);
    if (thread == 0) store_shared_u32(block_waits, 1);
    load_vector(0, EXCHANGED_HIDDEN, layer_epoch - 1);
    if (thread == 0) mbarrier_arrive(loaded);
    if (thread == 0) store_shared_u32(block_waits, 0);
    multiply_m_tiles(QKV);
    wait_until_taken();
  }

  // The first key of the item that a packed row does not see; 0 for a row beyond the item's.
  __device__ __forceinline__ uint32_t limit(uint32_t packed, KeptItem* record, uint32_t step) {
    uint32_t row = min(packed, record->item.rows - 1);
    uint32_t end = min(record->item.end, record->tile.length + record->tile.stride * step + record->tile.newest);
    uint32_t position = column_states[record->tile.first_column + row / 4].position;
    uint32_t following = position + 1;
    uint32_t visible = following > record->tile.offset ? following - record->tile.offset : 0;
    uint32_t end_2 = min(end, visible);
    return packed < record->item.rows ? end_2 : 0;
  }

  // The queries that were asked for to shared memory.
  __device__ __forceinline__ void settle_queries(uint32_t epoch, KeptItem* record, uint64_t (&asked)[4],
      uint32_t query_column, uint32_t query_head, uint32_t index) {
    uint32_t query_units = record->item.rows * (HEAD_DIM / 8);
    if (warp * 32 < query_units) {
      uint4 words = settle_flagged4(asked, exchange_words + ((query_column * (PROJECTED_ROWS / 8) + query_head * 16 + index % (HEAD_DIM / 8)) * 4 + EXCHANGE_QKV), epoch);
      if (thread < query_units) ((uint4*)(arena + QUERIES))[thread] = words;
    }
    named_barrier(1, CONSUMERS);
  }

  // For how many warps this one gives back a stage with these tiles: those with a tile in it share out all. Where
  // stages are not shared out, for itself.
  __device__ __forceinline__ uint32_t arrivals(uint32_t first_tile, uint32_t last_tile, uint32_t begin) {
    uint32_t tiles = max(last_tile, first_tile + 1) - first_tile;
    uint32_t groups = min(tiles, 8u);
    uint32_t index = ((warp + 8 - begin / 16 % 8) % 8 + 8 - first_tile % 8) % 8;
    uint32_t each = (QUOTIENTS_OF_8 >> (groups - 1) * 4) & 15;
    return each + (index < 8 - each * groups ? 1u : 0u);
  }

  // By the warp that attends them: the newest key and value, which were asked for, to shared memory.
  __device__ __forceinline__ void bring_newest(uint32_t newest, uint32_t epoch, uint64_t (&asked)[4],
      uint32_t newest_column, uint32_t kv_head, uint32_t place, bool is_value, uint32_t newest_unit) {
    uint4 words = settle_flagged4(asked, exchange_words + ((newest_column * (PROJECTED_ROWS / 8) + kv_head * 16 + place) * 4 + EXCHANGE_QKV), epoch);
    if (lane < newest * (HEAD_DIM / 8 * 2)) {
      uint4* place_2 = (is_value ? (uint4*)(arena + NEWEST) + 16 * HEAD_DIM * 2 / 16 : (uint4*)(arena + NEWEST)) + newest_unit;
      place_2[0] = words;
    }
    warp_barrier();
  }

  // By the warp that attends the tile: the newest keys and values that belong to a tile which begins with cached
  // ones, behind those, to rows `row` and following of its stage.
  __device__ __forceinline__ void join_newest(uint32_t row, uint32_t newest, uint8_t* keys, uint8_t* values) {
    uint32_t count = min(newest, 16 - row % 16) * (HEAD_DIM * 2 / 16);
    #pragma unroll 1
    for (uint32_t unit = lane; unit < count; unit += 32) {
      ((uint4*)(keys) + row * (HEAD_DIM * 2 / 16))[unit] = ((uint4*)(arena + NEWEST))[unit];
    }
    #pragma unroll 1
    for (uint32_t unit = lane; unit < count; unit += 32) {
      ((uint4*)(values) + row * (HEAD_DIM * 2 / 16))[unit] = ((uint4*)(arena + NEWEST) + 16 * HEAD_DIM * 2 / 16)[unit];
    }
    fence_proxy_async_shared();
    warp_barrier();
  }

  // The words of two units that were read in this order, or in the opposite one.
  __device__ __forceinline__ void cross(uint32_t (&early)[4], uint32_t (&late)[4], uint4 first, uint4 second,
      bool is_crossed) {
    early[0] = is_crossed ? second.x : first.x;
    late[0] = is_crossed ? first.x : second.x;
    early[1] = is_crossed ? second.y : first.y;
    late[1] = is_crossed ? first.y : second.y;
    early[2] = is_crossed ? second.z : first.z;
    late[2] = is_crossed ? first.z : second.z;
    early[3] = is_crossed ? second.w : first.w;
    late[3] = is_crossed ? first.w : second.w;
  }

  // Lanes of odd rows read the two units in the opposite order: no bank conflicts.
  __device__ __forceinline__ void read_crossed(uint32_t row, uint32_t both, uint32_t (&words)[2][4], uint8_t* keys) {
    const uint4* keys_2 = (const uint4*)(keys) + row * (HEAD_DIM / 8);
    uint32_t is_odd = lane / 4 % 2;
    uint4 first = keys_2[(both * 2 + is_odd) * 4 + lane % 4];
    uint4 second = keys_2[(both * 2 + (1 - is_odd)) * 4 + lane % 4];
    cross(words[0], words[1], first, second, is_odd != 0);
  }

  // 32 dims of 16 keys by those of the queries: low and high are what the lane has of keys r and r + 8.
  __device__ __forceinline__ void multiply_part(uint32_t (&low)[4], uint32_t (&high)[4], uint32_t part,
      float (&sums_0)[2][4], uint4* query) {
    uint4 early = make_u32x4(low[0], high[0], low[1], high[1]);
    uint4 late = make_u32x4(low[2], high[2], low[3], high[3]);
    uint4 query_2 = query[part * 4 + lane % 4];
    mma_bf16(sums_0[0], early, query_2.x, query_2.y);
    mma_bf16(sums_0[1], late, query_2.z, query_2.w);
  }

  // Logits times log2 e, and -inf (without softmax: weights, and 0) where a key is not seen.
  __device__ __forceinline__ void scale_and_mask(float (&logits)[4], uint32_t key, uint32_t (&limits)[2]) {
    uint32_t index = lane / 4;
    logits[0] = key + index < limits[0] ? logits[0] * 0.12751743f : -infinity();
    logits[1] = key + index < limits[1] ? logits[1] * 0.12751743f : -infinity();
    uint32_t tile_key = index + 8;
    logits[2] = key + tile_key < limits[0] ? logits[2] * 0.12751743f : -infinity();
    logits[3] = key + tile_key < limits[1] ? logits[3] * 0.12751743f : -infinity();
  }

  // exp2(logit - highest) in place, and the state shrunk to the new highest logit.
  __device__ __forceinline__ void weigh(float (&logits)[4], float (&highest)[2], float (&weight_sum)[2],
      float (&output)[HEAD_DIM / 64 * 4][4]) {
    #pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      float peak = maximum_f32(logits[column], logits[column + 2]);
      peak = maximum_f32(peak, shuffle_xor_f32(peak, 4));
      peak = maximum_f32(peak, shuffle_xor_f32(peak, 8));
      peak = maximum_f32(peak, shuffle_xor_f32(peak, 16));
      float new_highest = maximum_f32(highest[column], peak);
      float base = new_highest == -infinity() ? 0.0f : new_highest;
      float shrink = exp2_f32(highest[column] - base);
      highest[column] = new_highest;
      logits[column] = exp2_f32(logits[column] - base);
      logits[column + 2] = exp2_f32(logits[column + 2] - base);
      weight_sum[column] = fma_f32(weight_sum[column], shrink, logits[column] + logits[column + 2]);
      #pragma unroll
      for (uint32_t tile = 0; tile < HEAD_DIM / 64 * 4; ++tile) {
        output[tile][column] = output[tile][column] * shrink;
        output[tile][column + 2] = output[tile][column + 2] * shrink;
      }
    }
  }

  // Units slices * r, slices * r + 1, ... of a value, as bf16 pairs into words[slice][number].
  __device__ __forceinline__ void read_values(uint32_t row, uint32_t (&words)[2][4][4], uint32_t index,
      uint8_t* values) {
    const uint4* units = (const uint4*)(values) + (row * (HEAD_DIM / 8) + lane / 4 * (HEAD_DIM / 64));
    uint32_t is_late = lane % 4 / 2;
    uint4 first = units[is_late];
    uint4 second = units[1 - is_late];
    cross(words[0][index], words[1][index], first, second, is_late != 0);
  }

  // output (dims x queries) += values^T * weights, of every column tile.
  __device__ __forceinline__ void add_values(uint32_t first_row, uint32_t valid, uint32_t weights_0_0,
      uint32_t weights_0_1, uint8_t* values, float (&output)[HEAD_DIM / 64 * 4][4]) {
    uint32_t words[2][4][4];
    #pragma unroll
    for (uint32_t index = 0; index < 4; ++index) {
      uint32_t tile_key = min(lane % 4 * 2 + index % 2 + index / 2 * 8, valid - 1);
      read_values(first_row + tile_key, words, index, values);
    }
    #pragma unroll
    for (uint32_t tile = 0; tile < 8; ++tile) {
      uint32_t number = tile / 4;
      uint32_t in_slice = tile % 4;
      uint32_t low_early = byte_permute(words[number][0][in_slice / 2], words[number][1][in_slice / 2], in_slice % 2 == 0 ? LOW_HALVES : HIGH_HALVES);
      uint32_t high_early = byte_permute(words[number][0][(in_slice + 4) / 2], words[number][1][(in_slice + 4) / 2], (in_slice + 4) % 2 == 0 ? LOW_HALVES : HIGH_HALVES);
      uint32_t low_late = byte_permute(words[number][2][in_slice / 2], words[number][3][in_slice / 2], in_slice % 2 == 0 ? LOW_HALVES : HIGH_HALVES);
      uint32_t high_late = byte_permute(words[number][2][(in_slice + 4) / 2], words[number][3][(in_slice + 4) / 2], (in_slice + 4) % 2 == 0 ? LOW_HALVES : HIGH_HALVES);
      uint4 operand = make_u32x4(low_early, high_early, low_late, high_late);
      mma_bf16(output[tile], operand, weights_0_0, weights_0_1);
    }
  }

  // Fold 16 keys into the states of some column tiles, which share what is read of keys and values. The first
  // `valid` keys (one at least) exist; the first is key `key`.
  __device__ __forceinline__ void attend(uint32_t first_row, uint32_t valid, uint32_t key, uint8_t* keys, uint4* query,
      uint32_t (&limits)[2], float (&highest)[2], float (&weight_sum)[2], float (&output)[HEAD_DIM / 64 * 4][4],
      uint8_t* values) {
    float sums[2][4] = {};
    uint32_t row = first_row + lane / 4;
    uint32_t words[2][4];
    read_crossed(row, 0, words, keys);
    uint32_t words_2[2][4];
    read_crossed(row + 8, 0, words_2, keys);
    multiply_part(words[0], words_2[0], 0, sums, query);
    multiply_part(words[1], words_2[1], 1, sums, query);
    uint32_t words_3[2][4];
    read_crossed(row, 1, words_3, keys);
    uint32_t words_4[2][4];
    read_crossed(row + 8, 1, words_4, keys);
    multiply_part(words_3[0], words_4[0], 2, sums, query);
    multiply_part(words_3[1], words_4[1], 3, sums, query);
    float logits[4];
    #pragma unroll
    for (uint32_t element = 0; element < 4; ++element) logits[element] = sums[0][element] + sums[1][element];
    scale_and_mask(logits, key, limits);
    weigh(logits, highest, weight_sum, output);
    uint32_t weights_low = matrix_transpose_b16(pack_bf16x2(logits[0], logits[1]));
    uint32_t weights_high = matrix_transpose_b16(pack_bf16x2(logits[2], logits[3]));
    add_values(first_row, valid, weights_low, weights_high, values, output);
  }

  // This warp's tiles of 16 keys of [item.begin, end), which are cached, and of the newest ones behind them. The
  // newest keys of a tile that begins with cached ones are put behind those, into the stage; the other tiles of
  // newest keys are worked on as if they were in one more stage: so the code of a tile stands in the kernel once.
  __device__ __forceinline__ void attend_keys(uint32_t end, uint32_t newest_begin, uint32_t newest, uint32_t epoch,
      uint32_t begin, KeptItem* record, uint32_t step, uint32_t kv_head, uint4* query, uint32_t (&limits)[2],
      float (&highest)[2], float (&weight_sum)[2], float (&output)[HEAD_DIM / 64 * 4][4]) {
    uint32_t cached = begin < end ? end - begin : 0;
    uint32_t tiles = (cached + 15) / 16;
    uint32_t keys_end = begin + cached + newest;
    uint32_t all_tiles = (cached + newest + 15) / 16;
    uint32_t tile = (warp + 8 - begin / 16 % 8) % 8;
    uint32_t first_newest = newest > 0 ? cached / 16 : NEVER;
    bool own = first_newest % 8 == tile;
    uint32_t newest_units = newest * (HEAD_DIM / 8);
    uint32_t index = min(lane, newest_units * 2 - 1);
    bool is_value = index >= newest_units;
    uint32_t newest_unit = index - (is_value ? newest_units : 0);
    uint32_t newest_column = record->tile.newest_column + (newest_begin - (record->tile.length + record->tile.stride * step)) + newest_unit / (HEAD_DIM / 8);
    uint32_t kv_head_2 = 32 + (is_value ? 8u : 0u) + kv_head;
    uint32_t place = index % (HEAD_DIM / 8);
    uint64_t asked[4];
    if (newest > 0 && own) {
      ask_flagged4(asked, exchange_words + ((newest_column * (PROJECTED_ROWS / 8) + kv_head_2 * 16 + place) * 4 + EXCHANGE_QKV));
    }
    while (tile < all_tiles) {
      uint32_t stage = tile / (STAGE_KEYS / 16);
      bool is_cached = tile < tiles;
      uint32_t first_tile = stage * (STAGE_KEYS / 16);
      uint32_t last_tile = min(first_tile + STAGE_KEYS / 16, tiles);
      uint32_t arrivals_2 = arrivals(first_tile, last_tile, begin);
      uint32_t place_2 = use_stage + stage;
      uint32_t stage_2 = place_2 % 12;
      if (is_cached) mbarrier_wait(full + stage_2, (use_parity + place_2 / 12) % 2);
      uint8_t* chunk = ring + stage_2 * STAGE_BYTES;
      uint8_t* keys = chunk;
      uint8_t* values = chunk + VALUES_AT;
      if (!is_cached) {
        uint8_t* newest_keys = arena + NEWEST;
        uint8_t* newest_values = arena + NEWEST + 16 * HEAD_DIM * 2;
        first_tile = tiles;
        last_tile = all_tiles;
        uint32_t before = begin + tiles * 16 - newest_begin;
        uint32_t joined = before * (HEAD_DIM * 2);
        keys = newest_keys + joined;
        values = newest_values + joined;
      }
      while (tile < last_tile) {
        uint32_t row = (tile - first_tile) * 16;
        uint32_t key = begin + tile * 16;
        if (tile == first_newest) {
          bring_newest(newest, epoch, asked, newest_column, kv_head_2, place, is_value, newest_unit);
          if (is_cached) join_newest(row + cached % 16, newest, keys, values);
        }
        attend(row, keys_end - key, key, keys, query, limits, highest, weight_sum, output, values);
        tile += 8;
      }
      wait_for_u32(float_bits(output[0][0]));
      warp_barrier();
      if (lane == 0 && is_cached) mbarrier_arrive_many(empty + stage_2, arrivals_2);
    }
    uint32_t place_2 = use_stage + (cached + (STAGE_KEYS - 1)) / STAGE_KEYS;
    use_parity = (use_parity + place_2 / 12) % 2;
    use_stage = place_2 % 12;
  }

  // Highest logit and weight sum of this warp, per column: statistics[warp][column].
  __device__ __forceinline__ void lay_down_statistics(float (&weight_sum)[2], float (&highest)[2]) {
    float* words = (float*)(arena + STATISTICS);
    #pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      float total = weight_sum[column];
      total += shuffle_xor_f32(total, 4);
      total += shuffle_xor_f32(total, 8);
      total += shuffle_xor_f32(total, 16);
      uint32_t index = lane * 2 + column;
      if (index < 4) {
        uint32_t place = (warp * 4 + index) * 2;
        words[place] = highest[column];
        words[place + 1] = total;
      }
    }
  }

  // This warp's unnormalised output of some slices: attention[warp][column][slice][number].
  __device__ __forceinline__ void lay_output_down(float (&output)[HEAD_DIM / 64 * 4][4]) {
    uint4* scratch = (uint4*)(arena + ATTENTION);
    #pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      uint32_t number = lane % 4 * 2 + column;
      if (number < 4) {
        uint32_t row = (warp * 4 + number) * 2;
        uint4* place = scratch + (row * 64 + lane / 4 * 8) / 4;
        place[0] = make_u32x4(float_bits(output[0][column]), float_bits(output[1][column]), float_bits(output[2][column]), float_bits(output[3][column]));
        place[1] = make_u32x4(float_bits(output[0][column + 2]), float_bits(output[1][column + 2]), float_bits(output[2][column + 2]), float_bits(output[3][column + 2]));
        uint4* place_2 = scratch + ((row + 1) * 64 + lane / 4 * 8) / 4;
        place_2[0] = make_u32x4(float_bits(output[4][column]), float_bits(output[5][column]), float_bits(output[6][column]), float_bits(output[7][column]));
        place_2[1] = make_u32x4(float_bits(output[4][column + 2]), float_bits(output[5][column + 2]), float_bits(output[6][column + 2]), float_bits(output[7][column + 2]));
      }
    }
  }

  // Fold the states of rows `first`, `first + stride`, ... of the laid down ones: (low, high), the highest logit
  // and the sum of weights. Without softmax the last two are 0.
  __device__ __forceinline__ void fold_states(uint32_t first, uint32_t pair, float& result, float& result_2,
      float& highest, float& weight_sum) {
    float2* scratch = (float2*)(arena + ATTENTION);
    float2* statistics = (float2*)(arena + STATISTICS);
    float low = 0.0f;
    float high = 0.0f;
    highest = -infinity();
    #pragma unroll
    for (uint32_t state = 0; state < 8; ++state) highest = maximum_f32(highest, statistics[first + state * 4].x);
    float base = highest == -infinity() ? 0.0f : highest;
    weight_sum = 0.0f;
    #pragma unroll
    for (uint32_t state = 0; state < 8; ++state) {
      float2 numbers = statistics[first + state * 4];
      float weight = exp2_f32(numbers.x - base);
      float2 part = scratch[(first + state * 4) * (SLICE_PAIRS * 2) + pair];
      weight_sum = fma_f32(weight, numbers.y, weight_sum);
      low = fma_f32(weight, part.x, low);
      high = fma_f32(weight, part.y, high);
    }
    float inverse = weight_sum == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum);
    result = low * inverse;
    result_2 = high * inverse;
  }

  __device__ __forceinline__ void publish_partial(uint32_t row, uint32_t dim_pair, float low, float high, float lse,
      uint32_t epoch) {
    uint32_t partial = row * (HEAD_DIM + 4);
    publish_flagged(exchange_words + (partial + dim_pair * 2 + EXCHANGE_PARTIALS), float_bits(low), epoch);
    publish_flagged(exchange_words + (partial + dim_pair * 2 + 1 + EXCHANGE_PARTIALS), float_bits(high), epoch);
    if (dim_pair < 4) {
      publish_flagged(exchange_words + (partial + HEAD_DIM + dim_pair + EXCHANGE_PARTIALS), float_bits(lse), epoch);
    }
  }

  // `count` slices of column tile `index` of every group: its column c was laid down by the warps column_group,
  // column_group + column_groups, ..., as their column c.
  __device__ __forceinline__ void fold_slices(uint32_t first_slice, uint32_t epoch, KeptItem* record,
      uint32_t kv_head) {
    uint32_t rows = record->item.rows;
    #pragma unroll 1
    for (uint32_t output = thread; output < rows * (SLICE_PAIRS * 2); output += CONSUMERS) {
      uint32_t place = output / (SLICE_PAIRS * 2);
      uint32_t pair = output % (SLICE_PAIRS * 2);
      float low;
      float high;
      float highest;
      float weight_sum;
      fold_states(place, pair, low, high, highest, weight_sum);
      uint32_t dim_pair = (pair % SLICE_PAIRS / 4 * (HEAD_DIM / 64) + (pair / SLICE_PAIRS + first_slice)) * 4 + pair % SLICE_PAIRS % 4;
      float lse = weight_sum == 0.0f ? -infinity() : fma_f32(highest, 0.6931472f, log_f32(weight_sum));
      if (record->item.partial == WRITE_THROUGH) {
        uint32_t column = record->tile.first_column + place / 4;
        publish_tagged(input_words + (((((kv_head * 4 + place % 4) * HEAD_DIM + dim_pair * 2) / 32 + column) * 4 + ((kv_head * 4 + place % 4) * HEAD_DIM + dim_pair * 2) / 8 % 4) * 4 + ((kv_head * 4 + place % 4) * HEAD_DIM + dim_pair * 2) % 8 / 2 + EXCHANGE_ATTENTION), pack_bf16x2(low, high), 60, epoch);
      } else {
        publish_partial(record->item.partial + place, dim_pair, low, high, lse, epoch);
      }
    }
  }

  // Fold the key groups' states, in ascending order, as many dims at a time as there is room for, and publish the
  // result.
  __device__ __forceinline__ void fold(uint32_t epoch, float (&weight_sum)[2], float (&highest)[2],
      float (&output)[HEAD_DIM / 64 * 4][4], KeptItem* record, uint32_t kv_head) {
    lay_down_statistics(weight_sum, highest);
    lay_output_down(output);
    named_barrier(1, CONSUMERS);
    fold_slices(0, epoch, record, kv_head);
    named_barrier(1, CONSUMERS);
  }

  // This warp's share of an item whose queries are there.
  __device__ __forceinline__ void attend_rows(uint32_t cached_end, uint32_t newest_begin, uint32_t newest,
      uint32_t epoch, uint32_t begin, KeptItem* record, uint32_t step, uint32_t kv_head, uint4* query,
      uint32_t (&limits)[2]) {
    float highest[2];
    float weight_sum[2] = {};
    float output[HEAD_DIM / 64 * 4][4] = {};
    highest[0] = -infinity();
    highest[1] = -infinity();
    attend_keys(cached_end, newest_begin, newest, epoch, begin, record, step, kv_head, query, limits, highest,
        weight_sum, output);
    fold(epoch, weight_sum, highest, output, record, kv_head);
  }

  // The record at hand becomes that of another merge of this team.
  __device__ __forceinline__ void replace_merge(uint32_t job, uint32_t merge_rows) {
    named_barrier(warp / 4 + 2, TEAM_THREADS);
    if (warp % 4 == 0) keep_merge(job, merge_rows, warp, lane);
    named_barrier(warp / 4 + 2, TEAM_THREADS);
  }

  // `count` sources of a merge, numbers `first`, `first + every`, ... Lane n: the n-th of them, or the last: the
  // partial row of the tile's first packed row.
  __device__ __forceinline__ uint32_t sources(uint32_t first, uint32_t every, uint32_t count, KeptMerge* record) {
    uint32_t index = first + min(lane, count - 1) * every;
    uint32_t source;
    if (index < 20) {
      source = kept_plans[0].merges[warp / 4].sources[index];
    } else {
      source = load_constant_u32(kv_plans + (plan_index * PLAN_WORDS + (record->begin + index + PLAN_MERGE_SRC)));
    }
    return source;
  }

  // One more: `values` of a state with this LSE, or sums of several with the highest and the sum of weights.
  __device__ __forceinline__ void add(float values_0, float values_1, float values_2, float values_3, float lse,
      float weight, float& highest, float& weight_sum, float (&sums)[4]) {
    float new_highest = maximum_f32(highest, lse);
    float base = new_highest == -infinity() ? 0.0f : new_highest;
    float shrink = exp2_f32((highest - base) * 1.442695f);
    float grow = exp2_f32((lse - base) * 1.442695f);
    highest = new_highest;
    weight_sum = fma_f32(weight_sum, shrink, grow * weight);
    sums[0] = fma_f32(sums[0], shrink, grow * values_0);
    sums[1] = fma_f32(sums[1], shrink, grow * values_1);
    sums[2] = fma_f32(sums[2], shrink, grow * values_2);
    sums[3] = fma_f32(sums[3], shrink, grow * values_3);
  }

  // Sources `start`, `start + every`, ...: those that are waited for together, one after the other.
  __device__ __forceinline__ void fold_sources(uint32_t start, uint32_t every, uint32_t epoch, KeptMerge* record,
      float& highest, float& weight_sum, float (&sums)[4]) {
    uint32_t own = (record->end - record->begin + every - 1 - start) / every;
    #pragma unroll 1
    for (uint32_t first = 0; first < own; first += 5) {
      uint32_t count = min(own - first, 5u);
      uint32_t value = sources(start + first * every, every, count, record);
      uint4 states[8];
      uint32_t indices[8];
      indices[0] = ((value + record->row) * ((HEAD_DIM + 4) / 4) + HEAD_DIM / 4) * 4;
      #pragma unroll
      for (uint32_t index = 0; index < 5; ++index) {
        uint32_t source = shuffle_u32(value, index);
        indices[index + 1] = ((source + record->row) * ((HEAD_DIM + 4) / 4) + lane % (HEAD_DIM / 4)) * 4;
      }
      wait_flagged_places(states, exchange_words + EXCHANGE_PARTIALS, indices, 6, epoch);
      #pragma unroll
      for (uint32_t index = 0; index < 5; ++index) {
        if (index < count) {
          float lse = bits_float(shuffle_u32(states[0].x, index));
          add(bits_float(states[index + 1].x), bits_float(states[index + 1].y), bits_float(states[index + 1].z),
              bits_float(states[index + 1].w), lse, 1.0f, highest, weight_sum, sums);
        }
      }
    }
  }

  // This warp's folded state, for the first warp of its team.
  __device__ __forceinline__ void lay_down_folded(float (&sums)[4], float highest, float weight_sum) {
    uint4* address = (uint4*)(arena + ATTENTION) + warp * 33;
    address[lane] = make_u32x4(float_bits(sums[0]), float_bits(sums[1]), float_bits(sums[2]), float_bits(sums[3]));
    if (lane == 0) address[32] = make_u32x4(float_bits(highest), float_bits(weight_sum), 0, 0);
  }

  // What the other warps of the team laid down, into the first one's.
  __device__ __forceinline__ void fold_team(float& highest, float& weight_sum, float (&sums)[4]) {
    #pragma unroll
    for (uint32_t index = 1; index < 4; ++index) {
      uint4* address = (uint4*)(arena + ATTENTION) + (warp + index) * 33;
      uint4 part = address[lane];
      uint4 shared = address[32];
      add(bits_float(part.x), bits_float(part.y), bits_float(part.z), bits_float(part.w), bits_float(shared.x),
          bits_float(shared.y), highest, weight_sum, sums);
    }
  }

  // The row's output, from the state that all its sources were folded into: 4 dims a lane.
  __device__ __forceinline__ void finish_merge(uint32_t epoch, float weight_sum, float highest, float (&sums)[4],
      KeptMerge* record) {
    float inverse = weight_sum == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum);
    float lse = weight_sum == 0.0f ? -infinity() : highest + log_f32(weight_sum);
    if (lane < HEAD_DIM / 4) {
      #pragma unroll
      for (uint32_t pair = 0; pair < 2; ++pair) {
        uint32_t dim_pair = lane % (HEAD_DIM / 4) * 2 + pair;
        float low = sums[pair * 2] * inverse;
        float high = sums[pair * 2 + 1] * inverse;
        uint32_t column = record->tile.first_column + record->row / 4;
        publish_tagged(input_words + (((((record->head_and_chunk % HEAD_LIMIT * 4 + record->row % 4) * HEAD_DIM + dim_pair * 2) / 32 + column) * 4 + ((record->head_and_chunk % HEAD_LIMIT * 4 + record->row % 4) * HEAD_DIM + dim_pair * 2) / 8 % 4) * 4 + ((record->head_and_chunk % HEAD_LIMIT * 4 + record->row % 4) * HEAD_DIM + dim_pair * 2) % 8 / 2 + EXCHANGE_ATTENTION), pack_bf16x2(low, high), 60, epoch);
      }
    }
  }

  // ---- phase attention -------------------------------------------------------------------------------
  // Attention over the cache; then the merge of rows whose keys were split.
  // Waits for: qkv, partials.
  // Makes: partials, attention.
  __device__ __forceinline__ void attention(uint32_t step, uint32_t layer, uint32_t layer_epoch) {
    note_progress(step * PHASES + layer * 5 + 1);
    uint32_t first_item = kept_plans[0].first_item;
    uint32_t last_item = kept_plans[0].last_item;
    #pragma unroll 1
    for (uint32_t number = first_item; number < last_item; ++number) {
      uint32_t index = number - first_item;
      KeptItem* record = &kept_plans[0].items[min(index, 4u)];
      if (index >= 4) {
        named_barrier(1, CONSUMERS);
        if (thread == 0) keep_item(record, kv_plans + (plan_index * PLAN_WORDS + (number * 8 + PLAN_ITEMS)));
        named_barrier(1, CONSUMERS);
      }
      uint32_t kv_head = record->item.head;
      uint32_t begin = record->item.begin;
      uint32_t cached_end = min(record->item.end, record->tile.length + record->tile.stride * step);
      uint32_t newest_begin = max(begin, record->tile.length + record->tile.stride * step);
      uint32_t newest_end = min(record->item.end, record->tile.length + record->tile.stride * step + record->tile.newest);
      uint32_t newest = newest_begin < newest_end ? newest_end - newest_begin : 0;
      uint32_t query_units = record->item.rows * (HEAD_DIM / 8);
      uint32_t index_2 = min(thread, query_units - 1);
      uint32_t row = index_2 / (HEAD_DIM / 8);
      uint32_t query_column = record->tile.first_column + row / 4;
      uint32_t query_head = kv_head * 4 + row % 4;
      uint64_t asked[4];
      if (warp * 32 < query_units) {
        ask_flagged4(asked, exchange_words + ((query_column * (PROJECTED_ROWS / 8) + query_head * 16 + index_2 % (HEAD_DIM / 8)) * 4 + EXCHANGE_QKV));
      }
      uint4* shared = (uint4*)(arena + QUERIES);
      uint32_t row_2 = min(lane / 4, 3u);
      uint4* query = shared + row_2 * (HEAD_DIM / 8);
      uint32_t limits[2];
      uint32_t packed = lane % 4 * 2;
      limits[0] = limit(packed, record, step);
      uint32_t packed_2 = lane % 4 * 2 + 1;
      limits[1] = limit(packed_2, record, step);
      settle_queries(layer_epoch, record, asked, query_column, query_head, index_2);
      attend_rows(cached_end, newest_begin, newest, layer_epoch, begin, record, step, kv_head, query, limits);
    }
    // merge of partial states
    uint32_t jobs = kept_plans[0].jobs;
    uint32_t jobs_of_head = kept_plans[0].jobs_of_head;
    KeptMerge* record = &kept_plans[0].merges[warp / 4];
    uint32_t first_job = warp / 4 * BLOCKS + block;
    #pragma unroll 1
    for (uint32_t job = first_job; job < jobs; job += BLOCKS * 2) {
      if (job != first_job) replace_merge(job, jobs_of_head);
      if (record->row < record->tile.columns * 4) {
        float highest = -infinity();
        float weight_sum = 0.0f;
        float sums[4] = {};
        uint32_t sources = record->end - record->begin;
        if (sources <= 4) {
          if (warp % 4 == 0) fold_sources(0, 1, layer_epoch, record, highest, weight_sum, sums);
        } else {
          uint32_t start = warp % 4;
          fold_sources(start, 4, layer_epoch, record, highest, weight_sum, sums);
          lay_down_folded(sums, highest, weight_sum);
          named_barrier(warp / 4 + 2, TEAM_THREADS);
          if (warp % 4 == 0) fold_team(highest, weight_sum, sums);
        }
        if (warp % 4 == 0) finish_merge(layer_epoch, weight_sum, highest, sums, record);
      }
    }
    if (first_job + BLOCKS * 2 < jobs) replace_merge(first_job, jobs_of_head);
    if (jobs > 0) named_barrier(1, CONSUMERS);
  }

  // Bring `size_bytes` of global memory into L2, a line a block: a cold line under full load takes microseconds.
  __device__ __forceinline__ void prefetch(const bf16* source, uint32_t size_bytes) {
    const uint8_t* lines = (const uint8_t*)(source);
    if (thread == 0) {
      #pragma unroll 1
      for (uint32_t offset = block * LINE_BYTES; offset < size_bytes; offset += BLOCKS * LINE_BYTES) {
        prefetch_l2(lines + offset);
      }
    }
  }

  // ---- phase o ---------------------------------------------------------------------------------------
  // o; onto the residual.
  // Waits for: attention.
  // Makes: middle, middle_squares.
  __device__ __forceinline__ void o(uint32_t step, uint32_t layer, uint32_t layer_epoch) {
    note_progress(step * PHASES + layer * 5 + 2);
    prefetch(norms + (layer * 2 + 1) * HIDDEN, HIDDEN * 2);
    if (thread == 0) store_shared_u32(block_waits, 1);
    load_vector(0, EXCHANGED_ATTENTION, layer_epoch);
    if (thread == 0) store_shared_u32(block_waits, 0);
    multiply_m_tiles(O);
    wait_until_taken();
  }

  // ---- phase gate_up ---------------------------------------------------------------------------------
  // Norm; gate, up; silu(gate) * up.
  // Waits for: middle, middle_squares.
  // Makes: gated.
  __device__ __forceinline__ void gate_up(uint32_t step, uint32_t layer, uint32_t layer_epoch) {
    note_progress(step * PHASES + layer * 5 + 3);
    if (thread == 0) store_shared_u32(block_waits, 1);
    load_vector(0, EXCHANGED_MIDDLE, layer_epoch);
    if (thread == 0) mbarrier_arrive(loaded);
    if (thread == 0) store_shared_u32(block_waits, 0);
    multiply_m_tiles(GATE_UP);
    wait_until_taken();
  }

  // Bring a part of a vector into shared memory; ends with a barrier of the consumer warps.
  __device__ __forceinline__ void load_vector_of_down_slice(uint32_t first_unit, Exchanged vector, uint32_t epoch) {
    uint4* vector_2 = (uint4*)(arena + VECTOR);
    if (lane == 0) wait_tagged4(input_words + word_of_input(vector, (thread + first_unit) * 4), vector.exponent, epoch);
    warp_barrier();
    uint4 units[8];
    wait_tagged_units(units, input_words + word_of_input(vector, (thread + first_unit) * 4), vector.apart * (CONSUMERS * 4), DOWN_SLICE_UNITS / CONSUMERS, vector.exponent, epoch);
    #pragma unroll
    for (uint32_t index = 0; index < DOWN_SLICE_UNITS / CONSUMERS; ++index) {
      vector_2[thread + index * CONSUMERS] = units[index];
    }
    if (thread + DOWN_SLICE_UNITS / CONSUMERS * CONSUMERS < DOWN_SLICE_UNITS) {
      uint32_t first_unit_2 = thread + DOWN_SLICE_UNITS / CONSUMERS * CONSUMERS;
      uint4 units_2[8];
      wait_tagged_units(units_2, input_words + word_of_input(vector, (first_unit_2 + first_unit) * 4), vector.apart * (CONSUMERS * 4), 1, vector.exponent, epoch);
      vector_2[first_unit_2] = units_2[0];
    }
    named_barrier(1, CONSUMERS);
  }

  // ---- phase down ------------------------------------------------------------------------------------
  // down; onto the residual.
  // Waits for: gated.
  // Makes: hidden, hidden_squares.
  __device__ __forceinline__ void down(uint32_t step, uint32_t layer, uint32_t layer_epoch) {
    note_progress(step * PHASES + layer * 5 + 4);
    prefetch(norms + (layer * 2 + 2) * HIDDEN, HIDDEN * 2);
    uint32_t position = block % BLOCKS;
    float sums[1][4] = {};
    float sums_2[1][4] = {};
    if (thread == 0) store_shared_u32(block_waits, 1);
    load_vector_of_down_slice(0, EXCHANGED_GATED, layer_epoch);
    if (thread == 0) store_shared_u32(block_waits, 0);
    use_chunks(0, 14, sums);
    if (position + BLOCKS < DOWN_ROWS / 16) use_chunks(0, 14, sums_2);
    named_barrier(1, CONSUMERS);
    if (thread == 0) store_shared_u32(block_waits, 1);
    load_vector_of_down_slice(DOWN_SLICE_UNITS, EXCHANGED_GATED, layer_epoch);
    if (thread == 0) store_shared_u32(block_waits, 0);
    use_chunks(14, 28, sums);
    if (position + BLOCKS < DOWN_ROWS / 16) {
      if (thread == 0) store_shared_u32(block_waits, 1);
      use_chunks(14, 28, sums_2);
    }
    hand_over(sums);
    if (position + BLOCKS < DOWN_ROWS / 16) hand_over(sums_2);
    wait_until_taken();
  }

  // ---- phase lm_head ---------------------------------------------------------------------------------
  // Norm; lm_head; logits, where they are wanted; each lane's best candidates, in registers.
  // Waits for: hidden, hidden_squares.
  __device__ __forceinline__ void lm_head(uint32_t step, uint32_t step_epoch) {
    note_progress(step * PHASES + PHASE_LM_HEAD);
    if (step >= head_from || logits != nullptr) {
      if (thread == 0) store_shared_u32(block_waits, 1);
      load_vector(0, EXCHANGED_HIDDEN, step_epoch + 32);
      if (thread == 0) mbarrier_arrive(loaded);
      if (thread == 0) store_shared_u32(block_waits, 0);
      multiply_m_tiles(LM_HEAD);
      wait_until_taken();
    }
  }

  // Whether a column's token is sampled in this step, and filtered (0 or 1); it is written down.
  __device__ __forceinline__ uint32_t begin() {
    uint32_t filtered = 0;
    if (0 < column_count) {
      uint32_t options = load_constant_u32(&sequence_records[column_states[0].sequence].options);
      uint32_t following = column_states[0].number + 1;
      uint32_t value = load_constant_u32(&sequence_records[column_states[0].sequence].given);
      bool wanted = following >= value && following <= column_states[0].total;
      if ((options & 8) != 0 && (wanted && column_states[0].stopped == 0)) filtered = 1;
    }
    if (warp == 0 && lane == 0) {
      filter_states[0].filtered = filtered;
      filter_states[0].open = 0;
    }
    return filtered;
  }

  // No token yet.
  __device__ __forceinline__ void clear(Nearest& nearest) {
    nearest.first = -infinity();
    nearest.first_noisy = -infinity();
    nearest.first_token = NO_TOKEN;
    nearest.second = -infinity();
    nearest.second_noisy = -infinity();
    nearest.second_token = NO_TOKEN;
    nearest.left_out = -infinity();
    nearest.weight = 0.0f;
    nearest.best = -infinity();
    nearest.best_token = NO_TOKEN;
    nearest.best_scaled = -infinity();
  }

  // Before `take`: the token's weight, all relative to the lane's highest, and whether it is the most noisy.
  __device__ __forceinline__ void weigh_token(float scaled, float noisy, uint32_t token, Nearest& nearest) {
    float first = nearest.first;
    if (scaled > -infinity()) {
      float highest = first < scaled ? scaled : first;
      float before = nearest.weight * exp_f32(first - highest);
      nearest.weight = before + exp_f32(scaled - highest);
      if (noisy > nearest.best) {
        nearest.best = noisy;
        nearest.best_token = token;
        nearest.best_scaled = scaled;
      }
    }
  }

  // One more token; NaN is as if it were not there.
  __device__ __forceinline__ void take(float scaled, float noisy, uint32_t token, Nearest& nearest) {
    bool above_first = scaled > nearest.first;
    bool above_second = scaled > nearest.second;
    float dropped = above_second ? nearest.second : scaled;
    nearest.left_out = nearest.left_out < dropped ? dropped : nearest.left_out;
    nearest.second = above_first ? nearest.first : (above_second ? scaled : nearest.second);
    nearest.first = above_first ? scaled : nearest.first;
    nearest.second_noisy = above_first ? nearest.first_noisy : (above_second ? noisy : nearest.second_noisy);
    nearest.first_noisy = above_first ? noisy : nearest.first_noisy;
    nearest.second_token = above_first ? nearest.first_token : (above_second ? token : nearest.second_token);
    nearest.first_token = above_first ? token : nearest.first_token;
  }

  // The f32 that `ordered` made `word` of.
  __device__ __forceinline__ float number_of(uint32_t word) {
    return bits_float((word & SIGN) != 0 ? word ^ SIGN : word ^ ALL_BITS);
  }

  // A u32 for an f32 that is not NaN: the larger the number, the larger the word.
  __device__ __forceinline__ uint32_t ordered(float number) {
    uint32_t bits = float_bits(number);
    return (bits & SIGN) != 0 ? bits ^ ALL_BITS : bits | SIGN;
  }

  // The highest of the lanes' numbers (f32, none NaN), on every lane.
  __device__ __forceinline__ float highest_of_warp(float number) {
    return number_of(warp_maximum_u32(ordered(number)));
  }

  // The best of the lanes' candidates, the lowest id on ties, and the number beside it, on every lane.
  __device__ __forceinline__ void best_of_warp(uint32_t lane, float& best, uint32_t& token, float& number) {
    uint32_t key = ordered(best);
    uint32_t top = warp_maximum_u32(key);
    uint32_t lowest = warp_maximum_u32(key == top ? token ^ NO_TOKEN : 0) ^ NO_TOKEN;
    uint32_t source = warp_maximum_u32(key == top && token == lowest ? lane : 0);
    best = number_of(top);
    token = lowest;
    number = bits_float(shuffle_u32(float_bits(number), source));
  }

  // The nearest tokens of a warp's lanes and what all of theirs weigh, in shared memory. highest: that to which
  // a lane's weight is relative.
  __device__ __forceinline__ void lay_list_down(float highest, uint32_t* words, Nearest& nearest) {
    float above = highest_of_warp(highest);
    float part = 0.0f;
    if (highest > -infinity()) part = nearest.weight * exp_f32(highest - above);
    float weight = warp_sum_f32(part);
    best_of_warp(lane, nearest.best, nearest.best_token, nearest.best_scaled);
    #pragma unroll 1
    for (uint32_t rank = 0; rank < 8; ++rank) {
      uint32_t own_key = ordered(nearest.first);
      uint32_t top_key = warp_maximum_u32(own_key);
      uint32_t turn = warp_maximum_u32(own_key == top_key ? 32 - lane : 0);
      if (turn + lane == 32) {
        words[rank * 4] = float_bits(nearest.first);
        words[rank * 4 + 1] = float_bits(nearest.first_noisy);
        words[rank * 4 + 2] = nearest.first_token;
        nearest.first = nearest.second;
        nearest.first_noisy = nearest.second_noisy;
        nearest.first_token = nearest.second_token;
        nearest.second = -infinity();
        nearest.second_token = NO_TOKEN;
      }
    }
    float left_out = highest_of_warp(nearest.left_out < nearest.first ? nearest.first : nearest.left_out);
    if (lane == 0) {
      words[3] = float_bits(weight);
      words[7] = float_bits(left_out);
      words[11] = float_bits(nearest.best_scaled);
      words[32] = float_bits(nearest.best);
      words[33] = nearest.best_token;
    }
  }

  // A list of this warp's rows of a column.
  __device__ __forceinline__ void list_rows() {
    Nearest nearest;
    clear(nearest);
    const float2* pairs = (const float2*)(weighed) + load_constant_u32(&sequence_records[column_states[0].sequence].slot) * VOCAB;
    uint32_t position = (block + LM_HEAD_START) % BLOCKS;
    uint32_t own = warp * 32 + lane;
    #pragma unroll 1
    for (uint32_t first = own; first < OWN_ROWS; first += COLUMN_LANES * 4) {
      float scaled[4];
      float noisy[4];
      uint32_t tokens[4];
      #pragma unroll
      for (uint32_t index = 0; index < 4; ++index) {
        uint32_t row = first + index * COLUMN_LANES;
        uint32_t token = (row / 16 * BLOCKS + position) * 16 + row % 16;
        tokens[index] = token;
        scaled[index] = -infinity();
        noisy[index] = -infinity();
        if (token < VOCAB) {
          scaled[index] = pairs[token].x;
          noisy[index] = pairs[token].y;
        }
      }
      #pragma unroll
      for (uint32_t index = 0; index < 4; ++index) {
        weigh_token(scaled[index], noisy[index], tokens[index], nearest);
        take(scaled[index], noisy[index], tokens[index], nearest);
      }
    }
    float highest = nearest.first;
    lay_list_down(highest, (uint32_t*)(arena + LIST_ROWS) + warp * LIST_ROW_WORDS, nearest);
  }

  // The lists of a column's warps become one, in the place of the first.
  __device__ __forceinline__ void join_lists() {
    Nearest nearest;
    clear(nearest);
    float highest = -infinity();
    if (lane < 8) {
      uint32_t* words = (uint32_t*)(arena + LIST_ROWS) + lane * LIST_ROW_WORDS;
      highest = bits_float(words[0]);
      nearest.weight = bits_float(words[3]);
      nearest.left_out = bits_float(words[7]);
      nearest.best = bits_float(words[32]);
      nearest.best_token = words[33];
      nearest.best_scaled = bits_float(words[11]);
    }
    #pragma unroll 1
    for (uint32_t index = lane; index < 64; index += 32) {
      uint32_t* words = (uint32_t*)(arena + LIST_ROWS) + index / 8 * LIST_ROW_WORDS + index % 8 * 4;
      take(bits_float(words[0]), bits_float(words[1]), words[2], nearest);
    }
    warp_barrier();
    lay_list_down(highest, (uint32_t*)(arena + LIST_ROWS), nearest);
  }

  // The block's list, a word a lane.
  __device__ __forceinline__ void publish_list(uint32_t epoch, uint32_t step) {
    warp_barrier();
    if (lane < 32) {
      uint32_t index = (step % 2 * (BLOCKS * 8) + block * 8) * 4 + lane;
      publish_flagged(exchange_words + (index + EXCHANGE_SHORT_LISTS), ((uint32_t*)(arena + LIST_ROWS))[lane], epoch);
    }
    warp_barrier();
  }

  __device__ __forceinline__ void publish_lists(uint32_t step_epoch, uint32_t step) {
    if (begin() != 0) list_rows();
    named_barrier(1, CONSUMERS);
    if (warp < 1 && filter_states[0].filtered != 0) {
      join_lists();
      publish_list(step_epoch + 33, step);
    }
  }

  // The best of `count` candidates that lie `stride` apart, on every lane of the warp.
  __device__ __forceinline__ void best_candidate(uint2* candidates, uint32_t stride, uint32_t count, float& best,
      uint32_t& best_token) {
    best = -infinity();
    best_token = NO_TOKEN;
    #pragma unroll 1
    for (uint32_t other = lane; other < count; other += 32) {
      uint2 candidate = candidates[other * stride];
      if (bits_float(candidate.x) > best || (bits_float(candidate.x) == best && candidate.y < best_token)) {
        best = bits_float(candidate.x);
        best_token = candidate.y;
      }
    }
    best_of_levels(best, best_token, 5);
  }

  // All blocks' candidates into shared memory, as they lie in the exchange.
  __device__ __forceinline__ void gather(uint32_t first_unit, uint32_t epoch) {
    uint4* units = (uint4*)(arena + CANDIDATES);
    #pragma unroll 1
    for (uint32_t other = thread; other < BLOCKS * 2 / 2; other += CONSUMERS) {
      units[other] = wait_flagged4_acquire(exchange_words + ((first_unit + other) * 4 + EXCHANGE_CANDIDATES), epoch);
    }
  }

  // This warp's share of all blocks' lists of a column, into the region `listed`, and what they say besides.
  __device__ __forceinline__ void read_lists(uint32_t epoch, uint32_t step) {
    float* listed = (float*)((float2*)(arena + LISTED));
    float highest = -infinity();
    float weight = 0.0f;
    uint32_t role = lane % 8;
    uint32_t m_tile = chosen_tokens[0] / 16;
    uint32_t first_unit = step % 2 * (BLOCKS * 8);
    uint4 data[8];
    uint32_t places[8];
    uint32_t own = warp * 32 + lane;
    #pragma unroll 1
    for (uint32_t first = own; first < own + 5 * COLUMN_LANES; first += 5 * COLUMN_LANES) {
      #pragma unroll
      for (uint32_t index = 0; index < 5; ++index) {
        places[index] = (first_unit + min(first + index * COLUMN_LANES, BLOCKS * 8 - 1)) * 4;
      }
      wait_flagged_places(data, exchange_words + EXCHANGE_SHORT_LISTS, places, 5, epoch);
      #pragma unroll
      for (uint32_t index = 0; index < 5; ++index) {
        if (first + index * COLUMN_LANES < BLOCKS * 8) {
          listed[(first + index * COLUMN_LANES) * 2] = bits_float(data[index].x);
          listed[(first + index * COLUMN_LANES) * 2 + 1] = bits_float(data[index].y);
          bool is_owner = ((first + index * COLUMN_LANES) / 8 + LM_HEAD_START) % BLOCKS == m_tile % BLOCKS;
          if (role < 2 || (role == 2 && is_owner)) {
            float more = bits_float(data[index].w);
            float both = highest < (role == 0 ? bits_float(data[index].x) : more) ? (role == 0 ? bits_float(data[index].x) : more) : highest;
            if (both > -infinity()) {
              weight = weight * exp_f32(highest - both) + more * exp_f32((role == 0 ? bits_float(data[index].x) : more) - both);
              highest = both;
            }
          }
        }
      }
    }
    #pragma unroll 1
    for (uint32_t level = 0; level < 5; ++level) {
      uint32_t mask = 16u >> level;
      if (mask >= 8) {
        float value = shuffle_xor_f32(highest, mask);
        float other_weight = shuffle_xor_f32(weight, mask);
        float both = highest < value ? value : highest;
        if (both > -infinity()) {
          weight = weight * exp_f32(highest - both) + other_weight * exp_f32(value - both);
          highest = both;
        }
      }
    }
    if (lane <= 2) {
      uint32_t* words = (uint32_t*)(arena + LIST_ROWS) + warp * LIST_ROW_WORDS;
      words[lane * 2] = float_bits(highest);
      words[lane * 2 + 1] = float_bits(weight);
    }
  }

  // What a column's warps have read: the highest number that blocks say, and what all their tokens weigh.
  __device__ __forceinline__ void weight_said(float& above, float& value) {
    float highest = -infinity();
    float part = 0.0f;
    if (lane < 8) {
      highest = bits_float(((uint32_t*)(arena + LIST_ROWS) + lane * LIST_ROW_WORDS)[0]);
      part = bits_float(((uint32_t*)(arena + LIST_ROWS) + lane * LIST_ROW_WORDS)[1]);
    }
    above = highest_of_warp(highest);
    if (highest > -infinity()) part *= exp_f32(highest - above);
    value = warp_sum_f32(part);
  }

  // The highest number that blocks say of `what`, of those that a column's warps have read.
  __device__ __forceinline__ float highest_said(uint32_t what) {
    float highest = -infinity();
    if (lane < 8) highest = bits_float(((uint32_t*)(arena + LIST_ROWS) + lane * LIST_ROW_WORDS)[what * 2]);
    return highest_of_warp(highest);
  }

  // Of the listed tokens whose distance is below the limit: how many, what they weigh, the index of the most
  // noisy one (`units` if there is none), and how many are as noisy as that.
  __device__ __forceinline__ void nearer(float highest, float limit, uint32_t& total_count, float& total_weight,
      uint32_t& found, uint32_t& total_ties) {
    float2* listed = (float2*)(arena + LISTED);
    uint32_t count = 0;
    float weight = 0.0f;
    float best = -infinity();
    uint32_t best_index = BLOCKS * 8;
    uint32_t ties = 0;
    #pragma unroll 4
    for (uint32_t index = lane; index < BLOCKS * 8; index += 32) {
      float distance = highest - listed[index].x;
      if (distance < limit) {
        float noisy = listed[index].y;
        count += 1;
        weight += exp_f32(-distance);
        if (noisy == best) ties += 1;
        if (noisy > best) {
          best = noisy;
          best_index = index;
          ties = 1;
        }
      }
    }
    uint32_t own_key = ordered(best);
    bool is_best = own_key == warp_maximum_u32(own_key);
    total_count = warp_sum_u32(count);
    total_weight = warp_sum_f32(weight);
    found = BLOCKS * 8 - warp_maximum_u32(is_best ? BLOCKS * 8 - best_index : 0);
    total_ties = warp_sum_u32(is_best ? ties : 0);
  }

  // What the `top_k` nearest tokens weigh, with all that tie with the last of them, and 1; if fewer lie below the
  // distance `known`, what these weigh, and 0.
  __device__ __forceinline__ void weigh_top(float highest, float known, uint32_t top_k, float& least, uint32_t& found) {
    float2* listed = (float2*)(arena + LISTED);
    float low = 0.0f;
    float high = known;
    float at = known;
    least = 0.0f;
    found = 0;
    #pragma unroll 1
    for (uint32_t i = 0; i < 64; ++i) {
      uint32_t count = 0;
      float weight = 0.0f;
      #pragma unroll 2
      for (uint32_t index = lane; index < BLOCKS * 8; index += 32) {
        float distance = highest - listed[index].x;
        if (distance < at) {
          count += 1;
          weight += exp_f32(-distance);
        }
      }
      uint32_t total = warp_sum_u32(count);
      float total_weight = warp_sum_f32(weight);
      if (total >= top_k || at == known) least = total_weight;
      if (total < top_k) {
        low = at;
      } else {
        high = at;
        found = 1;
      }
      at = high < infinity() ? (low + high) * 0.5f : low * 2.0f + 1.0f;
      if (found == 0 || total == top_k || at <= low || at >= high) break;
    }
  }

  // The index of the token that is taken, or AS_IT_IS for the most noisy one of all, which has this `distance`,
  // or LEFT_OPEN. All tokens that are nearer than `known` are listed.
  __device__ __forceinline__ uint32_t judge_lists(float highest, float all_weigh, float distance, float known,
      uint32_t top_k, float reach, float top_p) {
    uint32_t most = top_k == 0 ? NO_TOKEN : top_k;
    uint32_t judged = UNDECIDED;
    uint32_t candidate = UNDECIDED;
    float limit = reach < known ? reach : known;
    float least = top_k == 0 ? all_weigh : -1.0f;
    float whole = all_weigh;
    if (top_k == 0 && top_p >= 1.0f && distance < reach) judged = AS_IT_IS;
    #pragma unroll 1
    for (uint32_t i = 0; i < 64; ++i) {
      if (judged != UNDECIDED) break;
      uint32_t count;
      float weight;
      uint32_t following;
      uint32_t ties;
      nearer(highest, limit, count, weight, following, ties);
      if (candidate == UNDECIDED) {
        bool is_out = count >= most || (top_p < 1.0f && weight >= top_p * whole);
        if (distance >= limit && known < reach && !is_out) judged = LEFT_OPEN;
      } else if (count < most) {
        if (top_p >= 1.0f || weight < top_p * (weight + exp_f32(-limit))) {
          judged = candidate;
        } else {
          if (least < 0.0f) {
            float top;
            uint32_t found;
            weigh_top(highest, known, top_k, top, found);
            least = top;
            if (found != 0 || known == infinity()) whole = top;
          }
          if (weight < top_p * least) {
            judged = candidate;
          } else if (weight < top_p * whole) {
            judged = LEFT_OPEN;
          }
        }
      }
      if (judged == UNDECIDED) {
        if (following == BLOCKS * 8 || ties > 1) {
          judged = LEFT_OPEN;
        } else {
          bool is_best = candidate == UNDECIDED && distance < limit;
          candidate = is_best ? AS_IT_IS : following;
          limit = highest - ((float2*)(arena + LISTED))[following].x;
        }
      }
    }
    return judged;
  }

  // A candidate, if it lies below the limit: else there is none, and the next round looks for one below it.
  __device__ __forceinline__ void propose(uint32_t token, float distance, float limit) {
    bool is_near = token != NO_TOKEN && distance < limit;
    if (lane == 0) {
      filter_states[0].has_candidate = is_near ? 1u : 0u;
      filter_states[0].chosen = token;
      filter_states[0].tested[0] = is_near ? distance : limit;
    }
  }

  // One warp: a column is left open. The first candidate is the token in the region `chosen`, so far from the
  // highest number of all. Where no token is found it stays without one.
  __device__ __forceinline__ void begin_rounds(float highest, float distance) {
    uint32_t token = chosen_tokens[0];
    float limit = bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].reach));
    warp_barrier();
    propose(token, distance, limit);
    if (lane == 0) {
      filter_states[0].limit = limit;
      filter_states[0].below = 0.0f;
      filter_states[0].above = infinity();
      filter_states[0].least = 1.0f;
      filter_states[0].most = infinity();
      filter_states[0].highest = highest;
      filter_states[0].tested[1] = 2.0f;
      filter_states[0].tested[2] = 4.0f;
      filter_states[0].tested[3] = 8.0f;
      filter_states[0].tested[4] = 16.0f;
      filter_states[0].tested[5] = infinity();
      filter_states[0].open = 1;
      chosen_tokens[0] = NO_TOKEN;
    }
  }

  // One warp: judge candidates, from the most noisy one on.
  __device__ __forceinline__ void decide(uint32_t epoch, uint32_t step) {
    float reach = bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].reach));
    float top_p = bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].top_p));
    uint32_t top_k = load_constant_u32(&sequence_records[column_states[0].sequence].top_k);
    float highest;
    float whole;
    weight_said(highest, whole);
    float left_out = highest_said(1);
    float best_scaled = highest_said(2);
    float known = left_out > -infinity() ? highest - left_out : infinity();
    uint32_t judged = judge_lists(highest, whole, highest - best_scaled, known, top_k, reach, top_p);
    if (judged == LEFT_OPEN) begin_rounds(highest, highest - best_scaled);
    if (judged < BLOCKS * 8) {
      uint4 unit = wait_flagged4(exchange_words + ((step % 2 * (BLOCKS * 8) + judged) * 4 + EXCHANGE_SHORT_LISTS), epoch);
      warp_barrier();
      if (lane == 0) chosen_tokens[0] = unit.z;
    }
  }

  // Whether every column has its token; the same on every thread.
  __device__ __forceinline__ bool is_done() {
    uint32_t pending = 0;
    #pragma unroll 1
    for (uint32_t column = lane; column < 1; column += 32) pending |= filter_states[column].open;
    #pragma unroll 1
    for (uint32_t level = 0; level < 5; ++level) pending |= shuffle_xor_u32(pending, 16u >> level);
    return pending == 0;
  }

  // One of two numbers, this lane's and that of the lane that it meets, which has the sum of the other: the
  // second where the lane has this bit.
  __device__ __forceinline__ float shared_out(float first, float second, uint32_t mask) {
    bool is_upper = (lane & mask) != 0;
    float given = is_upper ? first : second;
    float own = is_upper ? second : first;
    return own + shuffle_xor_f32(given, mask);
  }

  // Number l // 2 of the sums over all lanes, on lane l: lanes that meet share out what they add.
  __device__ __forceinline__ float sum_of_lanes(float (&sums)[12]) {
    float kept[8];
    #pragma unroll
    for (uint32_t index = 0; index < 4; ++index) kept[index] = shared_out(sums[index], sums[8 + index], 16);
    #pragma unroll
    for (uint32_t index = 4; index < 8; ++index) kept[index] = shared_out(sums[index], 0.0f, 16);
    #pragma unroll
    for (uint32_t index = 0; index < 4; ++index) kept[index] = shared_out(kept[index], kept[index + 4], 8);
    #pragma unroll
    for (uint32_t index = 0; index < 2; ++index) kept[index] = shared_out(kept[index], kept[index + 2], 4);
    kept[0] = shared_out(kept[0], kept[1], 2);
    return kept[0] + shuffle_xor_f32(kept[0], 1);
  }

  __device__ __forceinline__ void lay_down_best(uint32_t* words, float best, uint32_t token, float distance) {
    if (lane == 0) {
      words[0] = float_bits(best);
      words[1] = token;
      words[2] = float_bits(distance);
    }
  }

  // The warp's sums and its best, a word each, in shared memory: [column, group, word].
  __device__ __forceinline__ void lay_weights_down(float (&sums)[12], float& best, uint32_t& best_token,
      float& best_distance) {
    best_of_warp(lane, best, best_token, best_distance);
    uint32_t* words = (uint32_t*)(arena + FILTER_SUMS) + warp * 32;
    float total = sum_of_lanes(sums);
    if (lane % 2 == 0 && lane < 24) words[4 + lane / 2] = float_bits(total);
    lay_down_best(words, best, best_token, best_distance);
  }

  // This warp's rows of a column: what is nearer than each tested distance, into the region `filter_sums`.
  __device__ __forceinline__ void weigh_rows() {
    float sums[12] = {};
    float best = -infinity();
    uint32_t best_token = NO_TOKEN;
    float best_distance = infinity();
    float highest = filter_states[0].highest;
    float tested[6];
    #pragma unroll
    for (uint32_t index = 0; index < 5; ++index) tested[index] = filter_states[0].tested[index];
    tested[5] = infinity();
    const float2* pairs = (const float2*)(weighed) + load_constant_u32(&sequence_records[column_states[0].sequence].slot) * VOCAB;
    uint32_t first = warp * 32 + lane;
    uint32_t position = (block + LM_HEAD_START) % BLOCKS;
    #pragma unroll 2
    for (uint32_t row = first; row < OWN_ROWS; row += COLUMN_LANES) {
      uint32_t token = (row / 16 * BLOCKS + position) * 16 + row % 16;
      if (token < VOCAB) {
        float2 pair = pairs[token];
        float distance = highest - pair.x;
        float weight = exp_f32(-distance);
        #pragma unroll
        for (uint32_t index = 0; index < 6; ++index) {
          if (distance < tested[index]) {
            sums[2 * index] = sums[2 * index] + 1.0f;
            sums[2 * index + 1] = sums[2 * index + 1] + weight;
          }
        }
        if (distance < tested[0] && pair.y > best) {
          best = pair.y;
          best_token = token;
          best_distance = distance;
        }
      }
    }
    lay_weights_down(sums, best, best_token, best_distance);
  }

  // Word number `lane` of what a column's groups have laid down, together, in order.
  __device__ __forceinline__ uint32_t add_groups(uint32_t whose) {
    uint32_t lane_2 = lane % 16;
    uint32_t chosen = 0;
    float total = 0.0f;
    #pragma unroll 1
    for (uint32_t group = 0; group < 8; ++group) {
      uint32_t* words = (uint32_t*)(arena + FILTER_SUMS) + (group * 2 + whose) * 16;
      uint32_t* so_far = (uint32_t*)(arena + FILTER_SUMS) + (chosen * 2 + whose) * 16;
      float other = bits_float(words[0]);
      float best = bits_float(so_far[0]);
      if (other > best || (other == best && words[1] < so_far[1])) chosen = group;
      if (lane_2 >= 4) total += bits_float(words[lane_2]);
    }
    return lane_2 >= 4 ? float_bits(total) : ((uint32_t*)(arena + FILTER_SUMS) + (chosen * 2 + whose) * 16)[lane_2];
  }

  // A round up to the exchange: every warp weighs its rows, the first of a column's warps publishes.
  __device__ __forceinline__ void weigh_all(uint32_t epoch, uint32_t index) {
    if (filter_states[0].open != 0) weigh_rows();
    named_barrier(1, CONSUMERS);
    if (warp < 1 && filter_states[0].open != 0) {
      uint32_t word = add_groups(0);
      if (lane < 16) {
        uint32_t word_index = (index % 2 * BLOCKS + block) * 16 + lane;
        publish_flagged(exchange_words + (word_index + EXCHANGE_FILTERS), word, epoch);
      }
    }
  }

  // One unit of one block: a first one for the best, another for the sums; the rest of it nobody looks at.
  __device__ __forceinline__ void take_unit(uint4 unit, float (&sums)[4], float& best, uint32_t& token,
      float& distance) {
    sums[0] = sums[0] + bits_float(unit.x);
    sums[1] = sums[1] + bits_float(unit.y);
    sums[2] = sums[2] + bits_float(unit.z);
    sums[3] = sums[3] + bits_float(unit.w);
    float other = bits_float(unit.x);
    if (other > best || (other == best && unit.y < token)) {
      best = other;
      token = unit.y;
      distance = bits_float(unit.z);
    }
  }

  // This warp's share of all blocks' words of a column, together, into the region `filter_sums`.
  __device__ __forceinline__ void read_sums(uint32_t epoch, uint32_t index) {
    float sums[4] = {};
    float best = -infinity();
    uint32_t token = NO_TOKEN;
    float distance = infinity();
    uint32_t first_unit = index % 2 * BLOCKS * 4;
    uint4 data[8];
    uint32_t places[8];
    uint32_t own = warp * 32 + lane;
    #pragma unroll 1
    for (uint32_t first = own; first < own + 3 * COLUMN_LANES; first += 3 * COLUMN_LANES) {
      #pragma unroll
      for (uint32_t index_2 = 0; index_2 < 3; ++index_2) {
        places[index_2] = (first_unit + min(first + index_2 * COLUMN_LANES, BLOCKS * 4 - 1)) * 4;
      }
      wait_flagged_places(data, exchange_words + EXCHANGE_FILTERS, places, 3, epoch);
      #pragma unroll
      for (uint32_t index_2 = 0; index_2 < 3; ++index_2) {
        if (first + index_2 * COLUMN_LANES < BLOCKS * 4) take_unit(data[index_2], sums, best, token, distance);
      }
    }
    if (lane % 4 != 0) {
      best = -infinity();
      token = NO_TOKEN;
    }
    best_of_warp(lane, best, token, distance);
    #pragma unroll 1
    for (uint32_t level = 0; level < 3; ++level) {
      #pragma unroll
      for (uint32_t word = 0; word < 4; ++word) sums[word] = sums[word] + shuffle_xor_f32(sums[word], 16u >> level);
    }
    uint32_t* words = (uint32_t*)(arena + FILTER_SUMS) + (warp * 2 + 1) * 16;
    if (lane > 0 && lane < 4) {
      #pragma unroll
      for (uint32_t word = 0; word < 4; ++word) words[lane * 4 + word] = float_bits(sums[word]);
    }
    lay_down_best(words, best, token, distance);
  }

  // Narrow down where the top-k end, and what they weigh; then from where on nothing is kept, because too many
  // are nearer, or weigh too much. The further, the more, so the bounds of a warp are those of its lanes.
  __device__ __forceinline__ void narrow(float top_k, float top_p, float count, float& above, float at, float& most,
      float weight, float& below, float& least, float& limit) {
    bool holds_all = count >= top_k;
    bool holds_no_more = count <= top_k;
    above = -highest_of_warp(-(holds_all ? (above < at ? above : at) : above));
    most = -highest_of_warp(-(holds_all ? (most < weight ? most : weight) : most));
    below = highest_of_warp(holds_no_more ? (below < at ? at : below) : below);
    least = highest_of_warp(holds_no_more ? (least < weight ? weight : least) : least);
    float middle = (below + above) * 0.5f;
    if (above < infinity() && (middle <= below || middle >= above)) least = most;
    bool is_out = holds_all || (top_p < 1.0f && weight >= top_p * most);
    limit = -highest_of_warp(-(is_out ? (limit < at ? limit : at) : limit));
  }

  // Write down what is known, and the next pivots: evenly where the answer lies, in the bracket while it is open,
  // then below the limit. Without an upper end, each twice as far as the one before.
  __device__ __forceinline__ void keep_known(float least, float most, float below, float above, float limit) {
    bool is_open = least < most;
    float low = is_open ? below : 0.0f;
    float high = is_open ? above : limit;
    float evenly = low + (high - low) * ((float)(lane) * 0.2f);
    float doubling = (low + 1.0f) * (float)(1u << lane);
    if (lane > 0 && lane <= 4) filter_states[0].tested[lane] = high < infinity() ? evenly : doubling;
    if (lane == 0) {
      filter_states[0].limit = limit;
      filter_states[0].below = below;
      filter_states[0].above = above;
      filter_states[0].least = least;
      filter_states[0].most = most;
    }
  }

  // One warp: what a round's sums say of the bracket, the limit, the candidate; then what the next round weighs.
  // Lane i < 6 has tested distance i. word: number `lane` of the sums.
  __device__ __forceinline__ void judge_sums(uint32_t word) {
    float top_k = (float)(load_constant_u32(&sequence_records[column_states[0].sequence].top_k));
    float top_p = bits_float(load_constant_u32(&sequence_records[column_states[0].sequence].top_p));
    uint32_t value = shuffle_u32(word, 1);
    float distance = bits_float(shuffle_u32(word, 2));
    uint32_t index = min(lane, 5u);
    float count = bits_float(shuffle_u32(word, index * 2 + 4));
    float weight = bits_float(shuffle_u32(word, index * 2 + 5));
    float of_candidate = bits_float(shuffle_u32(word, 5));
    float of_all = bits_float(shuffle_u32(word, 14));
    float at = filter_states[0].tested[index];
    if (top_k == 0.0f || top_k > of_all) top_k = of_all;
    float limit = filter_states[0].limit;
    float below = filter_states[0].below;
    float above = filter_states[0].above;
    float least = filter_states[0].least;
    float most = filter_states[0].most;
    float candidate = filter_states[0].tested[0];
    bool has_candidate = filter_states[0].has_candidate != 0;
    warp_barrier();
    narrow(top_k, top_p, count, above, at, most, weight, below, least, limit);
    if (!has_candidate || candidate >= limit) {
      propose(value, distance, limit);
    } else if (lane == 0 && (top_p >= 1.0f || of_candidate < top_p * least)) {
      filter_states[0].open = 0;
      chosen_tokens[0] = filter_states[0].chosen;
    }
    keep_known(least, most, below, above, limit);
  }

  // The end of a round: a column's warps read what all blocks published, and the first of them decides.
  __device__ __forceinline__ void judge_all(uint32_t epoch, uint32_t index) {
    if (filter_states[0].open != 0) read_sums(epoch, index);
    named_barrier(1, CONSUMERS);
    if (warp < 1 && filter_states[0].open != 0) {
      uint32_t word = add_groups(1);
      judge_sums(word);
    }
  }

  __device__ __forceinline__ void filter(uint32_t step_epoch, uint32_t step) {
    if (filter_states[0].filtered != 0 && chosen_tokens[0] < CANCELLED_TOKEN) read_lists(step_epoch + 33, step);
    named_barrier(1, CONSUMERS);
    if (warp < 1 && (filter_states[0].filtered != 0 && chosen_tokens[0] < CANCELLED_TOKEN)) {
      decide(step_epoch + 33, step);
    }
    named_barrier(1, CONSUMERS);
    #pragma unroll 1
    for (uint32_t round = 0; round < 63; ++round) {
      if (is_done()) break;
      weigh_all(step_epoch + 34 + round, round);
      judge_all(step_epoch + 34 + round, round);
      named_barrier(1, CONSUMERS);
    }
  }

  // One thread of each block: count a token that was chosen, in the block that makes its logit.
  __device__ __forceinline__ void count(uint32_t column, uint32_t token) {
    bool is_ours = token / 16 % BLOCKS == (block + LM_HEAD_START) % BLOCKS;
    if ((load_constant_u32(&sequence_records[column_states[column].sequence].options) & 4) != 0 && is_ours && token < VOCAB) {
      uint32_t following = column_states[column].number + 1;
      uint32_t value = load_constant_u32(&sequence_records[column_states[column].sequence].given);
      bool wanted = following >= value && following <= column_states[column].total;
      if (wanted && column_states[column].stopped == 0) {
        uint32_t value_2 = load_constant_u32(&sequence_records[column_states[column].sequence].slot);
        token_counts[value_2 * VOCAB + token] = token_counts[value_2 * VOCAB + token] + 1;
      }
    }
  }

  __device__ __forceinline__ void count_chosen() {
    #pragma unroll 1
    for (uint32_t column = lane; column < column_count; column += 32) count(column, chosen_tokens[column]);
  }

  // ---- phase sampling --------------------------------------------------------------------------------
  // The grid's choice of every column's token; the meeting of all blocks that ends a step.
  // Waits for: candidates, short_lists, filters.
  // Makes: candidates, short_lists, filters.
  __device__ __forceinline__ void sampling(uint32_t step, uint32_t step_epoch) {
    note_progress(step * PHASES + PHASE_SAMPLING);
    uint32_t first_word = step % 2 * BLOCKS * 4;
    mbarrier_wait(step_added, step % 2);
    named_barrier(1, CONSUMERS);
    if ((options & 8) != 0) publish_lists(step_epoch, step);
    if (warp < 1) {
      float best;
      uint32_t best_token;
      best_candidate((uint2*)(arena + WARP_CANDIDATES) + warp, 1, 3, best, best_token);
      if (lane < 4) {
        bool is_cancelled = block == 0 && column_states[warp].cancelled != 0;
        uint32_t value = is_cancelled ? float_bits(infinity()) : float_bits(best);
        uint32_t word = lane % 2 == 0 ? value : (is_cancelled ? CANCELLED_TOKEN : best_token);
        uint32_t place = first_word + (block * 2 + warp) * 2 + lane;
        publish_flagged_release(exchange_words + (place + EXCHANGE_CANDIDATES), word, step_epoch + 33);
      }
    }
    uint32_t answer = 0;
    if (block == 0 && thread < column_count) {
      uint32_t sequence = column_states[thread].sequence;
      answer = load_relaxed_u32_sys(cancelled + sequence);
    }
    gather(first_word / 4, step_epoch + 33);
    named_barrier(1, CONSUMERS);
    if (block == 0 && thread < column_count && answer == epoch) column_states[thread].cancelled = 1;
    if (warp < 1) {
      float _;
      uint32_t best_token;
      best_candidate((uint2*)(arena + CANDIDATES) + warp, 2, BLOCKS, _, best_token);
      if (lane == 0) chosen_tokens[warp] = best_token;
    }
    named_barrier(1, CONSUMERS);
    if ((options & 8) != 0) filter(step_epoch, step);
    if ((options & 4) != 0 && warp == 0) count_chosen();
  }

  // One lane, one column: note what was sampled after its token, and the token that it has in the next step.
  __device__ __forceinline__ void take_token(uint32_t column, uint32_t& going_on) {
    uint32_t sequence = column_states[column].sequence;
    uint32_t index = column_states[column].number;
    uint32_t total = column_states[column].total;
    uint32_t given_2 = load_constant_u32(&sequence_records[sequence].given);
    uint32_t per_step = load_constant_u32(&sequence_records[sequence].per_step);
    uint32_t sampled = chosen_tokens[column];
    uint32_t stopped = column_states[column].stopped;
    if (index + 1 >= given_2 && index < total) {
      if (block == 0) {
        uint32_t place = sequence * (LAUNCH_TOKENS + 1) + index + 1;
        tokens[place] = (int32_t)(sampled);
        store_relaxed_u32_sys(emitted + place, sampled);
      }
      uint32_t first_stop = load_constant_u32(&sequence_records[sequence].stop_first);
      uint32_t stop_count = load_constant_u32(&sequence_records[sequence].stop_count);
      #pragma unroll 1
      for (uint32_t stop = 0; stop < stop_count; ++stop) {
        if ((uint32_t)(stop_ids[first_stop + stop]) == sampled) stopped = 1;
      }
    }
    uint32_t following = index + per_step;
    if (following >= total || sampled == CANCELLED_TOKEN) stopped = 1;
    column_states[column].stopped = stopped;
    if (stopped == 0) going_on = 1;
    if (following >= given_2 && per_step == 1) {
      next_token[column] = min(sampled, VOCAB - 1);
    } else {
      next_token[column] = given(sequence, following);
    }
  }

  // One warp takes every column's next token, given or chosen, and finds whether to go on; then all warps go on
  // together, and the producer lane with them.
  __device__ __forceinline__ void take_tokens(uint32_t step) {
    if (warp == 0) {
      uint32_t going_on = 0;
      #pragma unroll 1
      for (uint32_t column = lane; column < column_count; column += 32) take_token(column, going_on);
      #pragma unroll 1
      for (uint32_t level = 0; level < 5; ++level) going_on |= shuffle_xor_u32(going_on, 16u >> level);
      warp_barrier();
      if (thread == 0) {
        if (block == 0) status[0] = (int32_t)(step + 1);
        mbarrier_wait(step_done + 1, (step + 1) % 2);
        next_token[1] = going_on == 0 ? 1u : 0u;
        fence_proxy_async();
        mbarrier_arrive(step_done);
      }
    }
    named_barrier(1, CONSUMERS);
  }

  // In the consumer role: use up the block's chunks of a matrix that were fetched in vain.
  __device__ __forceinline__ void skip() {
    #pragma unroll 1
    for (uint32_t i = (block + QKV_START) % BLOCKS; i < QKV_ROWS / 16; i += BLOCKS) {
      #pragma unroll 1
      for (uint32_t i_2 = 0; i_2 < 8; ++i_2) {
        mbarrier_wait(full + use_stage, use_parity);
        uint8_t* chunk = ring + use_stage * STAGE_BYTES;
        warp_barrier();
        if (lane == 0) mbarrier_arrive(empty + use_stage);
        advance(use_stage, use_parity, 12);
      }
    }
  }

  __device__ __forceinline__ void run() {
    sequence_records = (const SequenceRecord*)(sequences);
    column_records = (const ColumnRecord*)(columns);
    arena = shared_arena();
    chosen_tokens = (uint32_t*)(arena + CHOSEN);
    filter_states = (FilterState*)(arena + FILTERS);
    kept_plans = (KeptPlan*)(arena + RECORDS);
    column_states = (ColumnState*)(arena + COLUMNS);
    block = blockIdx.x;
    thread = threadIdx.x;
    warp = thread / 32;
    lane = thread % 32;
    exchange_words = (uint64_t*)(exchange);
    input_words = (uint32_t*)(exchange);
    full = (uint64_t*)(arena + RING_BARRIERS);
    empty = full + 12;
    ring = arena + RING;
    block_waits = (uint32_t*)(arena + BLOCK_WAITS);
    summed = (uint64_t*)(arena + REDUCTION_BARRIERS);
    taken = summed + 3;
    step_added = taken + 3;
    loaded = step_added + 1;
    step_done = (uint64_t*)(arena + STEP_DONE);
    next_token = (uint32_t*)(arena + NEXT_TOKEN);
    // barriers, and every column's first token
    if (thread == 0) initialise();
    take_first();
    block_barrier();
    if (warp >= 8) {
      keep_104_registers();
      // the producer warp: one lane walks the whole model's chunk list
      if (thread == CONSUMERS) {
        plan_index = 0;
        fill_stage = 0;
        fill_parity = 1;
        landed_stage = 0;
        landed_parity = 0;
        under_way = 0;
        for (uint32_t step = 0; step < steps; ++step) {
          follow_plan(plan_index, step);
          for (uint32_t layer = 0; layer < 32; ++layer) {
            uint64_t layer_offset = (uint64_t)(layer) * LAYER_BYTES;
            // qkv
            fetch(QKV, layer_offset);
            // keys and values of earlier tokens
            if (layer == 0 && step > 0 && launch_is_over(step)) return;
            copy_items(layer, step);
            // o
            fetch(O, layer_offset);
            // gate_up
            fetch(GATE_UP, layer_offset);
            // down
            fetch(DOWN, layer_offset);
          }
          // lm_head
          if (step >= head_from || logits != nullptr) fetch(LM_HEAD, 0);
          // sampling
        }
      }
      // the adding warps
      if (warp > 8 && warp <= 11) {
        adding = 0;
        adding_parity = 0;
        loaded_parity = 0;
        for (uint32_t step = 0; step < steps; ++step) {
          uint32_t step_epoch = epoch + step * STEP_EPOCHS;
          for (uint32_t layer = 0; layer < 32; ++layer) {
            uint32_t layer_epoch = step_epoch + layer + 1;
            finish_qkv(layer_epoch, layer);
            finish_matrix(O, norms + (layer * 2 + 1) * HIDDEN, EXCHANGED_MIDDLE, EXCHANGE_MIDDLE_SQUARES, layer_epoch);
            finish_gate_up(layer_epoch);
            finish_matrix(DOWN, norms + (layer * 2 + 2) * HIDDEN, EXCHANGED_HIDDEN, EXCHANGE_HIDDEN_SQUARES,
                layer_epoch);
          }
          float best = -infinity();
          uint32_t best_token = NO_TOKEN;
          if (step >= head_from || logits != nullptr) finish_lm_head(step_epoch, step, best, best_token);
          lay_down_candidates(best, best_token);
          mbarrier_wait(step_done, step % 2);
          uint32_t stop = 0;
          if (lane == 0) {
            stop = next_token[1];
            mbarrier_arrive(step_done + 1);
          }
          if (shuffle_u32(stop, 0) != 0) break;
        }
      }
    } else {
      take_200_registers();
      // the consumer warps
      turn = 0;
      turn_parity = 0;
      plan_index = 0;
      use_stage = 0;
      use_parity = 0;
      for (uint32_t step = 0; step < steps; ++step) {
        uint32_t step_epoch = epoch + step * STEP_EPOCHS;
        bool has_new_plan = follow_plan(plan_index, step);
        begin_step(step);
        if (has_new_plan) keep_plan();
        named_barrier(1, CONSUMERS);
        publish_embeddings(step_epoch);
        load_angles();
        named_barrier(1, CONSUMERS);
        for (uint32_t layer = 0; layer < 32; ++layer) {
          uint32_t layer_epoch = step_epoch + layer + 1;
          qkv(step, layer, layer_epoch);
          attention(step, layer, layer_epoch);
          o(step, layer, layer_epoch);
          gate_up(step, layer, layer_epoch);
          down(step, layer, layer_epoch);
        }
        lm_head(step, step_epoch);
        sampling(step, step_epoch);
        take_tokens(step);
        if (next_token[1] != 0) {
          // the producer lane has fetched what it does not need the tokens for: use it up
          if (step + 1 < steps) skip();
          break;
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) decode_step(const uint8_t* weights, const bf16* norms,
    const bf16* embedding, const float* rope, bf16* kv, const int32_t* page_table, uint32_t kv_pages,
    const int32_t* kv_plans, const int32_t* tiles, const int32_t* sequences, const int32_t* columns, uint8_t* exchange,
    int32_t* tokens, uint32_t* emitted, const uint32_t* cancelled, const int32_t* stop_ids, const uint32_t* masks,
    const float* logit_bias, uint32_t* token_counts, float* weighed, float* logits, uint32_t* progress, int32_t* status,
    uint32_t steps, uint32_t head_from, uint32_t column_count, uint32_t plan_count, uint32_t options, uint32_t epoch) {
  DecodeStep{weights, norms, embedding, rope, kv, page_table, kv_pages, kv_plans, tiles, sequences, columns, exchange,
      tokens, emitted, cancelled, stop_ids, masks, logit_bias, token_counts, weighed, logits, progress, status, steps,
      head_from, column_count, plan_count, options, epoch}.run();
}
