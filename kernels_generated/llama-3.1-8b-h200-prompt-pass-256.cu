// A pass over a prompt of a Llama model in one persistent kernel. Generated; do not edit.
// Regenerate with: cheetah generate llama-3.1-8b --prompt-pass 256
//
// model: hidden 4096, ffn 14336, vocab 128256, heads 32, kv_heads 8, head_dim 128, layers 32
// machine: h200, 132 blocks of 384 threads
// pass: tokens 256, tile_tokens 128, warpgroups 2, stages 6, cut_tokens 128, key_tile 32
// beside a decode kernel of: consumer_warps 8, stage_bytes 16384, stages 12, in_flight 4, in_flight_waiting 3, adding_warps 3, sync flags, page_size 16, max_context 8192, batch 1, tokens 1, down_slices 2, max_steps 64, kv_chunk 0, kv_dtype bf16, drafts 0, by_numbers 0
// shared memory: 201840 bytes of 232448

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

__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

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

__device__ __forceinline__ void add_release_u64(uint64_t* place, uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" :: "l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ void wait_at_least_u64(const uint64_t* place, uint64_t value) {
  uint64_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(place) : "memory");
  } while (seen < value);
}

__device__ __forceinline__ uint32_t load_constant_u32(const void* place) {
  uint32_t result;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(result) : "l"(place));
  return result;
}

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000); }
__device__ __forceinline__ float bf16_to_f32(bf16 value) { return __uint_as_float((uint32_t)value.bits << 16); }

__device__ __forceinline__ bf16 f32_to_bf16(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

__device__ __forceinline__ float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ __forceinline__ float exp2_f32(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float exp_f32(float value) { return __expf(value); }
__device__ __forceinline__ float rsqrt_f32(float value) { return rsqrtf(value); }
__device__ __forceinline__ float divide_f32(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float maximum_f32(float a, float b) { return fmaxf(a, b); }

__device__ __forceinline__ uint4 make_u32x4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return make_uint4(x, y, z, w);
}

__device__ __forceinline__ uint64_t matrix_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes) {
  return (uint64_t)((shared_address(start) & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16
    | (uint64_t)(stride_bytes >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

__device__ __forceinline__ void wgmma_bf16_n32(float (&sums)[16], uint4 a, uint64_t b, uint32_t accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\t"
    "setp.ne.b32 p, %21, 0;\n\t"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n\t}"
    : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
    : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_bf16_n128(float (&sums)[64], uint4 a, uint64_t b, uint32_t accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\t"
    "setp.ne.b32 p, %69, 0;\n\t"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
    "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n\t}"
    : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
    : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_bf16_n128_transposed(float (&sums)[64], uint4 a, uint64_t b, uint32_t accumulate) {
  asm volatile("{\n\t.reg .pred p;\n\t"
    "setp.ne.b32 p, %69, 0;\n\t"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
    "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t}"
    : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
    : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}
#endif

constexpr uint32_t RING_BARRIERS = 196608;  // 96 bytes
constexpr uint32_t RING = 0;  // 196608 bytes
constexpr uint32_t SCALES = 196720;  // 1024 bytes
constexpr uint32_t SQUARES = 197744;  // 4096 bytes
constexpr uint32_t BLOCKS = 132;
constexpr uint32_t BF16_TILE_BYTES = 1024;
constexpr uint32_t STAGE_BYTES = 32768;
constexpr uint32_t ACTIVATION_TILE_BYTES = 8192;
constexpr uint32_t STAGE_WEIGHTS_BYTES = 16384;
constexpr uint32_t PASS_TOKENS = 256;
constexpr uint32_t GROUP_BYTES = 512;
constexpr uint32_t KEY_ROWS = 8704;
constexpr uint32_t HEAD_GROUP_BYTES = 2048;
constexpr uint32_t KEY_TILE_BYTES = 8192;
constexpr uint32_t KEYS_AT = 8455168;
constexpr uint32_t VALUES_AT = 26280960;
constexpr uint32_t LOW_HALVES = 0x5410;
constexpr uint32_t HIGH_HALVES = 0x7632;
constexpr uint32_t UNIT_BYTES = 128;
constexpr uint32_t CONSUMERS = 256;
constexpr uint32_t HIDDEN_M_TILES = 256;
constexpr uint32_t SQUARES_AT = 6292480;
constexpr uint32_t HIDDEN = 4096;
constexpr uint32_t ACCUMULATOR_BYTES = 512;
constexpr uint32_t RESIDUAL_AT = 1024;
constexpr uint32_t HIDDEN_AT = 4195328;
constexpr uint32_t QUERIES_AT = 6325248;
constexpr uint32_t STEP_BYTES = 512;
constexpr uint32_t LANES = 32;
constexpr uint32_t CORE_BYTES = 128;
constexpr uint32_t ATTENTION_AT = 44106752;
constexpr uint32_t HEAD_DIM = 128;
constexpr uint32_t TO_VALUES = 16384;
constexpr uint32_t MAX_CONTEXT = 8192;
constexpr uint32_t DOWN_ROWS = 4096;
constexpr uint32_t O_ROWS = 4096;
constexpr uint32_t QKV_ROWS = 6144;
constexpr uint32_t TILE_TOKENS = 128;
constexpr uint32_t BF16_SLOT_TILE_BYTES = 2048;
constexpr uint32_t PARTS_AT = 53543936;
constexpr uint32_t GATED_AT = 46203904;
constexpr uint32_t GATE_UP_ROWS = 28672;
constexpr uint32_t DOWN_COLUMNS = 14336;
constexpr uint32_t GATE_UP_COLUMNS = 4096;
constexpr uint32_t O_COLUMNS = 4096;
constexpr uint32_t QKV_COLUMNS = 4096;
constexpr uint32_t LAYER_BYTES = 436207616;
constexpr uint32_t O_OFFSET = 50331648;
constexpr uint32_t GATE_UP_OFFSET = 83886080;
constexpr uint32_t DOWN_OFFSET = 318767104;

struct Matrix {
  uint32_t m_tiles, row_tiles, parts, k_tiles, waves, last_wave_width, wave_bytes, chunks, chunk_bytes,
      last_chunk_bytes, pieces, piece_tiles;
};

__device__ constexpr Matrix QKV = {384, 128, 2, 64, 3, 120, 17301504, 8, 16384, 16384, 4, 16};
__device__ constexpr Matrix O = {256, 128, 4, 32, 2, 124, 17301504, 8, 16384, 16384, 2, 16};
__device__ constexpr Matrix GATE_UP = {1792, 256, 1, 128, 14, 76, 17301504, 8, 16384, 16384, 8, 16};
__device__ constexpr Matrix DOWN = {256, 128, 4, 112, 2, 124, 60555264, 28, 16384, 16384, 7, 16};

struct PromptPass {
  const uint8_t* weights;
  const bf16* norms;
  const bf16* embedding;
  const float* rope;
  bf16* kv;
  const int32_t* page_table;
  uint32_t kv_pages;
  const int32_t* ids;
  const int32_t* groups;
  const int32_t* segments;
  const int32_t* tiles;
  uint8_t* workspace;
  const int32_t* wanted;
  bf16* hidden_states;
  uint32_t column_count, segment_count, tile_count, wanted_count;
  uint64_t arrivals;
  uint8_t* arena;
  uint32_t block, thread, warp, lane, token_tiles;
  uint64_t* full;
  uint64_t* empty;
  uint8_t* ring;
  uint32_t of_few, weights_stage, weights_parity, activations_stage, activations_parity, stage, parity, turn;
  float* scales;
  uint32_t turn_2;
  float* scales_2;

  // In any role: what follows from a thread's place is worked out anew. Kept from phase to phase, it would take
  // the registers that the sums of a tile need.
  __device__ __forceinline__ void renew() {
    block = renewed_u32(block);
    thread = renewed_u32(thread);
    warp = renewed_u32(warp);
    lane = renewed_u32(lane);
  }

  // The next stage of the ring; behind the last comes the first, in the next pass.
  __device__ __forceinline__ void advance(uint32_t& stage, uint32_t& parity, uint32_t stages) {
    stage += 1;
    if (stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // In the weights role: a lane an M-tile, 64 columns a stage.
  __device__ __forceinline__ void copy_weights(Matrix matrix, uint64_t offset) {
    const uint8_t* packed = weights + offset;
    uint32_t lane_2 = lane;
    #pragma unroll 1
    for (uint32_t tile = block; tile < token_tiles * matrix.row_tiles; tile += BLOCKS) {
      uint32_t row = tile / token_tiles;
      uint32_t row_tile = row / matrix.parts;
      uint32_t part = row % matrix.parts;
      uint32_t first = row_tile * 6;
      uint32_t count = min(matrix.m_tiles - first, 6u);
      uint32_t m_tile = min(first + lane_2, matrix.m_tiles - 1);
      uint32_t wave = m_tile / BLOCKS;
      uint32_t position = m_tile % BLOCKS;
      uint32_t width = BLOCKS - wave / (matrix.waves - 1) * (BLOCKS - matrix.last_wave_width);
      uint64_t wave_bytes = (uint64_t)(wave) * (uint64_t)(matrix.wave_bytes);
      #pragma unroll 1
      for (uint32_t chunk = part * matrix.pieces; chunk < (part + 1) * matrix.pieces; ++chunk) {
        const uint8_t* source = packed + (wave_bytes + (uint64_t)(width * chunk * matrix.chunk_bytes + position * matrix.last_chunk_bytes));
        #pragma unroll 1
        for (uint32_t k_tile = 0; k_tile < matrix.piece_tiles; k_tile += 2) {
          uint32_t size = min(matrix.piece_tiles - k_tile, 2u) * BF16_TILE_BYTES;
          uint64_t* barrier = full + weights_stage;
          if (lane < count) {
            mbarrier_wait(empty + weights_stage, weights_parity);
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, size * count);
            bulk_copy(ring + weights_stage * STAGE_BYTES + lane * (2 * BF16_TILE_BYTES), source + k_tile * BF16_TILE_BYTES, size, barrier);
          }
          advance(weights_stage, weights_parity, 6);
        }
      }
      warp_barrier();
    }
  }

  // In the weights role, which brings nothing here, but whose arrival is needed.
  __device__ __forceinline__ void copy_nothing() {
    #pragma unroll 1
    for (uint32_t tile = block; tile < tile_count * 32; tile += BLOCKS) {
      uint4 of_tile = ((const uint4*)(tiles))[tile / 32];
      uint32_t end = (of_tile.y + of_tile.z + 31) / 32;
      #pragma unroll 1
      for (uint32_t i = 0; i < end; ++i) {
        uint64_t* barrier = full + weights_stage;
        if (lane < 1) {
          mbarrier_wait(empty + weights_stage, weights_parity);
          if (lane == 0) mbarrier_arrive_expect_tx(barrier, 0);
        }
        advance(weights_stage, weights_parity, 6);
      }
      warp_barrier();
    }
  }

  // In the weights role: a lane an M-tile, 64 columns a stage.
  __device__ __forceinline__ void copy_weights_of_o(Matrix matrix, uint64_t offset) {
    const uint8_t* packed = weights + offset;
    uint32_t lane_2 = lane;
    #pragma unroll 1
    for (uint32_t tile = block; tile < token_tiles * matrix.row_tiles; tile += BLOCKS) {
      uint32_t row = tile / token_tiles;
      uint32_t row_tile = row / matrix.parts;
      uint32_t part = row % matrix.parts;
      uint32_t first = row_tile * 8;
      uint32_t count = min(matrix.m_tiles - first, 8u);
      uint32_t m_tile = min(first + lane_2, matrix.m_tiles - 1);
      uint32_t wave = m_tile / BLOCKS;
      uint32_t position = m_tile % BLOCKS;
      uint32_t width = BLOCKS - wave / (matrix.waves - 1) * (BLOCKS - matrix.last_wave_width);
      uint64_t wave_bytes = (uint64_t)(wave) * (uint64_t)(matrix.wave_bytes);
      #pragma unroll 1
      for (uint32_t chunk = part * matrix.pieces; chunk < (part + 1) * matrix.pieces; ++chunk) {
        const uint8_t* source = packed + (wave_bytes + (uint64_t)(width * chunk * matrix.chunk_bytes + position * matrix.last_chunk_bytes));
        #pragma unroll 1
        for (uint32_t k_tile = 0; k_tile < matrix.piece_tiles; k_tile += 2) {
          uint32_t size = min(matrix.piece_tiles - k_tile, 2u) * BF16_TILE_BYTES;
          uint64_t* barrier = full + weights_stage;
          if (lane < count) {
            mbarrier_wait(empty + weights_stage, weights_parity);
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, size * count);
            bulk_copy(ring + weights_stage * STAGE_BYTES + lane * (2 * BF16_TILE_BYTES), source + k_tile * BF16_TILE_BYTES, size, barrier);
          }
          advance(weights_stage, weights_parity, 6);
        }
      }
      warp_barrier();
    }
  }

  // In the weights role: a lane an M-tile, 64 columns a stage.
  __device__ __forceinline__ void copy_weights_of_gate_up(Matrix matrix, uint64_t offset) {
    const uint8_t* packed = weights + offset;
    uint32_t lane_2 = lane;
    #pragma unroll 1
    for (uint32_t tile = block; tile < token_tiles * matrix.row_tiles; tile += BLOCKS) {
      uint32_t row = tile / token_tiles;
      uint32_t row_tile = row / matrix.parts;
      uint32_t part = row % matrix.parts;
      uint32_t first = row_tile * 7;
      uint32_t count = min(matrix.m_tiles - first, 7u);
      uint32_t m_tile = min(first + lane_2, matrix.m_tiles - 1);
      uint32_t wave = m_tile / BLOCKS;
      uint32_t position = m_tile % BLOCKS;
      uint32_t width = BLOCKS - wave / (matrix.waves - 1) * (BLOCKS - matrix.last_wave_width);
      uint64_t wave_bytes = (uint64_t)(wave) * (uint64_t)(matrix.wave_bytes);
      #pragma unroll 1
      for (uint32_t chunk = part * matrix.pieces; chunk < (part + 1) * matrix.pieces; ++chunk) {
        const uint8_t* source = packed + (wave_bytes + (uint64_t)(width * chunk * matrix.chunk_bytes + position * matrix.last_chunk_bytes));
        #pragma unroll 1
        for (uint32_t k_tile = 0; k_tile < matrix.piece_tiles; k_tile += 2) {
          uint32_t size = min(matrix.piece_tiles - k_tile, 2u) * BF16_TILE_BYTES;
          uint64_t* barrier = full + weights_stage;
          if (lane < count) {
            mbarrier_wait(empty + weights_stage, weights_parity);
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, size * count);
            bulk_copy(ring + weights_stage * STAGE_BYTES + lane * (2 * BF16_TILE_BYTES), source + k_tile * BF16_TILE_BYTES, size, barrier);
          }
          advance(weights_stage, weights_parity, 6);
        }
      }
      warp_barrier();
    }
  }

  // In the activations role.
  __device__ __forceinline__ void copy_activations(Matrix matrix, uint8_t* input) {
    #pragma unroll 1
    for (uint32_t tile = block; tile < token_tiles * matrix.row_tiles; tile += BLOCKS) {
      uint32_t token_tile = tile % token_tiles;
      uint32_t row_tile = tile / token_tiles / matrix.parts;
      uint32_t part = tile / token_tiles % matrix.parts;
      uint8_t* source = input + token_tile * ACTIVATION_TILE_BYTES;
      uint32_t end = (part + 1) * matrix.k_tiles;
      #pragma unroll 1
      for (uint32_t k_tile = part * matrix.k_tiles; k_tile < end; k_tile += 2) {
        uint32_t count = min(end - k_tile, 2u);
        uint64_t* barrier = full + activations_stage;
        mbarrier_wait(empty + activations_stage, activations_parity);
        mbarrier_arrive_expect_tx(barrier, count * ACTIVATION_TILE_BYTES);
        #pragma unroll 1
        for (uint32_t index = 0; index < count; ++index) {
          uint8_t* place = ring + activations_stage * STAGE_BYTES + (STAGE_WEIGHTS_BYTES + index * ACTIVATION_TILE_BYTES);
          uint64_t k_bytes = (uint64_t)(k_tile + index) * (PASS_TOKENS / 8 * GROUP_BYTES);
          bulk_copy(place, source + k_bytes, ACTIVATION_TILE_BYTES, barrier);
        }
        advance(activations_stage, activations_parity, 6);
      }
    }
  }

  // In the activations role: keys and values, a stage for each tile of them.
  __device__ __forceinline__ void copy_keys() {
    #pragma unroll 1
    for (uint32_t tile = block; tile < tile_count * 32; tile += BLOCKS) {
      uint4 of_tile = ((const uint4*)(tiles))[tile / 32];
      uint32_t end = (of_tile.y + of_tile.z + 31) / 32;
      uint32_t kv_head = tile % 32 / 4;
      #pragma unroll 1
      for (uint32_t key_tile = 0; key_tile < end; ++key_tile) {
        uint64_t offset = (uint64_t)(kv_head * (KEY_ROWS / 8) + (of_tile.w + key_tile * 32) / 8) * HEAD_GROUP_BYTES + (uint64_t)((of_tile.w + key_tile * 32) % 8 * 16);
        uint64_t* barrier = full + activations_stage;
        mbarrier_wait(empty + activations_stage, activations_parity);
        mbarrier_arrive_expect_tx(barrier, 2 * KEY_TILE_BYTES);
        bulk_copy(ring + activations_stage * STAGE_BYTES, workspace + KEYS_AT + offset, KEY_TILE_BYTES, barrier);
        bulk_copy(ring + activations_stage * STAGE_BYTES + KEY_TILE_BYTES, workspace + VALUES_AT + offset, KEY_TILE_BYTES, barrier);
        advance(activations_stage, activations_parity, 6);
      }
    }
  }

  // The 16 rows of an M-tile as 16 columns of a vector in token order, rounded to bf16.
  __device__ __forceinline__ void store_rows(uint8_t* into, float value, float (&weights)[2], float value_2,
      float value_3, float value_4, uint32_t m_tile, uint32_t group) {
    uint2 words;
    bool is_odd = lane / 4 % 2 != 0;
    uint32_t mine = is_odd ? pack_bf16x2(bf16_to_f32(f32_to_bf16(value)) * weights[0], bf16_to_f32(f32_to_bf16(value_2)) * weights[1]) : pack_bf16x2(bf16_to_f32(f32_to_bf16(value_3)) * weights[0], bf16_to_f32(f32_to_bf16(value_4)) * weights[1]);
    uint32_t other = shuffle_xor_u32(is_odd ? pack_bf16x2(bf16_to_f32(f32_to_bf16(value_3)) * weights[0], bf16_to_f32(f32_to_bf16(value_4)) * weights[1]) : pack_bf16x2(bf16_to_f32(f32_to_bf16(value)) * weights[0], bf16_to_f32(f32_to_bf16(value_2)) * weights[1]), 4);
    uint32_t even = is_odd ? other : mine;
    uint32_t odd = is_odd ? mine : other;
    uint32_t low = byte_permute(even, odd, LOW_HALVES);
    uint32_t high = byte_permute(even, odd, HIGH_HALVES);
    words.x = low;
    words.y = high;
    uint32_t k_tile = m_tile / 2;
    uint32_t half = m_tile % 2;
    uint32_t row = lane / 4;
    uint32_t token = lane % 4 * 2 + lane / 4 % 2;
    uint64_t block = (uint64_t)(k_tile * (PASS_TOKENS / 8) + group) * GROUP_BYTES;
    uint8_t* address = into + block + (uint64_t)(row / 2 * UNIT_BYTES + token * 16) + half * 8;
    ((uint2*)(address))[0] = words;
  }

  // Every token's sum over the row tile: its M-tiles in order.
  __device__ __forceinline__ void end(uint32_t row_tile, uint32_t token_tile) {
    named_barrier(1, CONSUMERS);
    if (thread < 32) {
      float* kept = (float*)(arena + SQUARES) + thread;
      uint32_t count = min(HIDDEN_M_TILES - row_tile * 8, 8u);
      float total = 0.0f;
      #pragma unroll 1
      for (uint32_t m_tile = 0; m_tile < count; ++m_tile) total += kept[m_tile * 32];
      uint32_t token = token_tile * 32 + thread;
      ((float*)(workspace + SQUARES_AT))[row_tile * PASS_TOKENS + token] = total;
    }
    named_barrier(1, CONSUMERS);
  }

  // The tokens' embeddings as the first residual stream.
  __device__ __forceinline__ void embed() {
    #pragma unroll 1
    for (uint32_t tile = block; tile < of_few * (HIDDEN_M_TILES / 8); tile += BLOCKS) {
      uint32_t row_tile = tile / of_few;
      uint32_t token_tile = tile % of_few;
      uint32_t m_tile = row_tile * 8 + warp;
      if (m_tile < HIDDEN_M_TILES) {
        uint32_t row = m_tile * 16 + lane / 4;
        float weights[2];
        weights[0] = bf16_to_f32(norms[row]);
        weights[1] = bf16_to_f32(norms[row + 8]);
        #pragma unroll
        for (uint32_t group = 0; group < 4; ++group) {
          uint32_t group_2 = token_tile * 4 + group;
          uint32_t token = group_2 * 8 + lane % 4 * 2;
          uint32_t token_id = load_constant_u32(ids + token);
          uint32_t of_row = m_tile * 16 + lane / 4;
          uint64_t place = (uint64_t)(token_id) * HIDDEN + (uint64_t)(min(of_row, HIDDEN - 1));
          float value = of_row < HIDDEN ? bf16_to_f32(embedding[place]) : 0.0f;
          float value_2 = value;
          uint32_t token_2 = group_2 * 8 + lane % 4 * 2 + 1;
          uint32_t token_id_2 = load_constant_u32(ids + token_2);
          uint32_t of_row_2 = m_tile * 16 + lane / 4;
          uint64_t place_2 = (uint64_t)(token_id_2) * HIDDEN + (uint64_t)(min(of_row_2, HIDDEN - 1));
          float value_3 = of_row_2 < HIDDEN ? bf16_to_f32(embedding[place_2]) : 0.0f;
          float value_4 = value_3;
          uint32_t token_3 = group_2 * 8 + lane % 4 * 2;
          uint32_t token_id_3 = load_constant_u32(ids + token_3);
          uint32_t of_row_3 = m_tile * 16 + lane / 4 + 8;
          uint64_t place_3 = (uint64_t)(token_id_3) * HIDDEN + (uint64_t)(min(of_row_3, HIDDEN - 1));
          float value_5 = of_row_3 < HIDDEN ? bf16_to_f32(embedding[place_3]) : 0.0f;
          float value_6 = value_5;
          uint32_t token_4 = group_2 * 8 + lane % 4 * 2 + 1;
          uint32_t token_id_4 = load_constant_u32(ids + token_4);
          uint32_t of_row_4 = m_tile * 16 + lane / 4 + 8;
          uint64_t place_4 = (uint64_t)(token_id_4) * HIDDEN + (uint64_t)(min(of_row_4, HIDDEN - 1));
          float value_7 = of_row_4 < HIDDEN ? bf16_to_f32(embedding[place_4]) : 0.0f;
          float value_8 = value_7;
          uint64_t index = ((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(group_2)) * (ACCUMULATOR_BYTES / 16);
          float4 kept;
          kept.x = value_2;
          kept.y = value_4;
          kept.z = value_6;
          kept.w = value_8;
          ((float4*)((float*)(workspace + RESIDUAL_AT)))[index + (uint64_t)(lane)] = kept;
          float* of_lane = (float*)(arena + SQUARES) + (warp * 32 + lane * 2);
          float* kept_2 = of_lane;
          float square = fma_f32(bf16_to_f32(f32_to_bf16(value_2)), bf16_to_f32(f32_to_bf16(value_2)), bf16_to_f32(f32_to_bf16(value_6)) * bf16_to_f32(f32_to_bf16(value_6)));
          square += shuffle_xor_f32(square, 4);
          square += shuffle_xor_f32(square, 8);
          square += shuffle_xor_f32(square, 16);
          if (lane < 4) kept_2[group * 8] = square;
          float square_2 = fma_f32(bf16_to_f32(f32_to_bf16(value_4)), bf16_to_f32(f32_to_bf16(value_4)), bf16_to_f32(f32_to_bf16(value_8)) * bf16_to_f32(f32_to_bf16(value_8)));
          square_2 += shuffle_xor_f32(square_2, 4);
          square_2 += shuffle_xor_f32(square_2, 8);
          square_2 += shuffle_xor_f32(square_2, 16);
          if (lane < 4) kept_2[group * 8 + 1] = square_2;
          store_rows(workspace + HIDDEN_AT, value_4, weights, value_8, value_2, value_6, m_tile, group_2);
        }
      }
      end(row_tile, token_tile);
    }
  }

  __device__ __forceinline__ void load_queries(uint4 (&queries)[8], uint32_t head, uint32_t column) {
    uint8_t* first = workspace + QUERIES_AT + (uint64_t)((head * (PASS_TOKENS / 16) + column / 16) * 8) * STEP_BYTES;
    const uint4* words = (const uint4*)(first);
    queries[0] = words[lane];
    queries[1] = words[LANES + lane];
    queries[2] = words[2 * LANES + lane];
    queries[3] = words[3 * LANES + lane];
    queries[4] = words[4 * LANES + lane];
    queries[5] = words[5 * LANES + lane];
    queries[6] = words[6 * LANES + lane];
    queries[7] = words[7 * LANES + lane];
  }

  // A group: logits = queries x keys of the next stage; two units of dims are the 16 of a step.
  __device__ __forceinline__ void multiply_keys(float (&logits)[16], uint4 (&queries)[8]) {
    mbarrier_wait(full + stage, parity);
    uint8_t* memory = ring + stage * STAGE_BYTES;
    uint64_t keys = matrix_descriptor(memory, CORE_BYTES, HEAD_GROUP_BYTES);
    wgmma_fence();
    wgmma_bf16_n32(logits, queries[0], keys, 0);
    uint64_t descriptor = keys + 2 * CORE_BYTES / 16;
    wgmma_bf16_n32(logits, queries[1], descriptor, 1);
    uint64_t descriptor_2 = keys + 2 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[2], descriptor_2, 1);
    uint64_t descriptor_3 = keys + 3 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[3], descriptor_3, 1);
    uint64_t descriptor_4 = keys + 4 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[4], descriptor_4, 1);
    uint64_t descriptor_5 = keys + 5 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[5], descriptor_5, 1);
    uint64_t descriptor_6 = keys + 6 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[6], descriptor_6, 1);
    uint64_t descriptor_7 = keys + 7 * (2 * CORE_BYTES / 16);
    wgmma_bf16_n32(logits, queries[7], descriptor_7, 1);
    wgmma_commit();
    advance(stage, parity, 6);
  }

  // Keys that a row does not see have no weight. Most tiles lie whole before the first row of the warp.
  __device__ __forceinline__ void mask(float (&logits)[16], uint32_t first_key, uint32_t first_row, uint32_t position) {
    bool partial = first_key + 31 > first_row;
    if (partial) {
      #pragma unroll
      for (uint32_t group = 0; group < 4; ++group) {
        uint32_t key = first_key + group * 8 + lane % 4 * 2;
        bool seen = key <= position;
        uint32_t element = group * 4;
        logits[element] = seen ? logits[element] : -infinity();
        uint32_t key_2 = first_key + group * 8 + lane % 4 * 2 + 1;
        bool seen_2 = key_2 <= position;
        uint32_t element_2 = group * 4 + 1;
        logits[element_2] = seen_2 ? logits[element_2] : -infinity();
        uint32_t key_3 = first_key + group * 8 + lane % 4 * 2;
        uint32_t position_2 = position + 8;
        bool seen_3 = key_3 <= position_2;
        uint32_t element_3 = group * 4 + 2;
        logits[element_3] = seen_3 ? logits[element_3] : -infinity();
        uint32_t key_4 = first_key + group * 8 + lane % 4 * 2 + 1;
        uint32_t position_3 = position + 8;
        bool seen_4 = key_4 <= position_3;
        uint32_t element_4 = group * 4 + 3;
        logits[element_4] = seen_4 ? logits[element_4] : -infinity();
      }
    }
  }

  // The weights of a tile of keys, from `first_key` on, as operand A; `rows` say what that makes of the sums.
  __device__ __forceinline__ void weigh(float (&logits)[16], uint4 (&weights)[2], uint32_t first_key,
      uint32_t first_row, uint32_t position, float (&largest)[2], float (&shrinks)[2], float (&sums)[2]) {
    mask(logits, first_key, first_row, position);
    float largest_2 = largest[0];
    #pragma unroll
    for (uint32_t group = 0; group < 4; ++group) {
      largest_2 = maximum_f32(largest_2, logits[group * 4]);
      largest_2 = maximum_f32(largest_2, logits[group * 4 + 1]);
    }
    largest_2 = maximum_f32(largest_2, shuffle_xor_f32(largest_2, 1));
    largest_2 = maximum_f32(largest_2, shuffle_xor_f32(largest_2, 2));
    bool seen = largest_2 > -infinity();
    float origin = seen ? largest_2 * 0.12751743f : 0.0f;
    shrinks[0] = exp2_f32(largest[0] * 0.12751743f - origin);
    largest[0] = largest_2;
    sums[0] = sums[0] * shrinks[0];
    float largest_3 = largest[1];
    #pragma unroll
    for (uint32_t group = 0; group < 4; ++group) {
      largest_3 = maximum_f32(largest_3, logits[group * 4 + 2]);
      largest_3 = maximum_f32(largest_3, logits[group * 4 + 3]);
    }
    largest_3 = maximum_f32(largest_3, shuffle_xor_f32(largest_3, 1));
    largest_3 = maximum_f32(largest_3, shuffle_xor_f32(largest_3, 2));
    bool seen_2 = largest_3 > -infinity();
    float origin_2 = seen_2 ? largest_3 * 0.12751743f : 0.0f;
    shrinks[1] = exp2_f32(largest[1] * 0.12751743f - origin_2);
    largest[1] = largest_3;
    sums[1] = sums[1] * shrinks[1];
    #pragma unroll
    for (uint32_t group = 0; group < 4; ++group) {
      uint32_t element = group * 4;
      logits[element] = exp2_f32(fma_f32(logits[element], 0.12751743f, -origin));
      sums[0] = sums[0] + logits[element];
      uint32_t element_2 = group * 4 + 1;
      logits[element_2] = exp2_f32(fma_f32(logits[element_2], 0.12751743f, -origin));
      sums[0] = sums[0] + logits[element_2];
      uint32_t element_3 = group * 4 + 2;
      logits[element_3] = exp2_f32(fma_f32(logits[element_3], 0.12751743f, -origin_2));
      sums[1] = sums[1] + logits[element_3];
      uint32_t element_4 = group * 4 + 3;
      logits[element_4] = exp2_f32(fma_f32(logits[element_4], 0.12751743f, -origin_2));
      sums[1] = sums[1] + logits[element_4];
    }
    weights[0] = make_u32x4(pack_bf16x2(logits[0], logits[1]), pack_bf16x2(logits[2], logits[3]), pack_bf16x2(logits[4], logits[5]), pack_bf16x2(logits[6], logits[7]));
    weights[1] = make_u32x4(pack_bf16x2(logits[8], logits[9]), pack_bf16x2(logits[10], logits[11]), pack_bf16x2(logits[12], logits[13]), pack_bf16x2(logits[14], logits[15]));
  }

  // A group: output += weights x values of a stage; two groups of keys are the 16 of a step, dims the columns.
  __device__ __forceinline__ void multiply_values(float (&output)[64], uint4 (&weights)[2], uint32_t stage) {
    uint8_t* memory = ring + stage * STAGE_BYTES + KEY_TILE_BYTES;
    uint64_t values = matrix_descriptor(memory, HEAD_GROUP_BYTES, CORE_BYTES);
    wgmma_fence();
    wgmma_bf16_n128_transposed(output, weights[0], values, 1);
    uint64_t descriptor = values + 2 * HEAD_GROUP_BYTES / 16;
    wgmma_bf16_n128_transposed(output, weights[1], descriptor, 1);
    wgmma_commit();
  }

  // What was summed of the values before, on the scale of the newest weights.
  __device__ __forceinline__ void bring_to_origin(float (&output)[64], float (&shrinks)[2]) {
    #pragma unroll
    for (uint32_t group = 0; group < 16; ++group) {
      output[group * 4] = output[group * 4] * shrinks[0];
      output[group * 4 + 1] = output[group * 4 + 1] * shrinks[0];
      output[group * 4 + 2] = output[group * 4 + 2] * shrinks[1];
      output[group * 4 + 3] = output[group * 4 + 3] * shrinks[1];
    }
  }

  // Multiply the values of stage `previous` with their weights, and make those of the next stage's keys.
  __device__ __forceinline__ void go_on(float (&logits)[16], uint4 (&queries)[8], float (&output)[64],
      uint4 (&weights)[2], uint4 (&following)[2], uint32_t& previous, uint32_t first_key, uint32_t first_row,
      uint32_t position, float (&largest)[2], float (&shrinks)[2], float (&sums)[2]) {
    uint32_t stage_2 = stage;
    multiply_keys(logits, queries);
    multiply_values(output, weights, previous);
    wgmma_wait_but_one();
    weigh(logits, following, first_key, first_row, position, largest, shrinks, sums);
    wgmma_wait_all();
    warp_barrier();
    if (lane == 0) mbarrier_arrive(empty + previous);
    bring_to_origin(output, shrinks);
    previous = stage_2;
  }

  // The last values.
  __device__ __forceinline__ void finish_values(float (&output)[64], uint4 (&weights)[2], uint32_t previous) {
    multiply_values(output, weights, previous);
    wgmma_wait_all();
    warp_barrier();
    if (lane == 0) mbarrier_arrive(empty + previous);
  }

  // The rows' outputs in token order: four groups of 8 dims are a K-tile, a lane's unit of it.
  __device__ __forceinline__ void store(float (&output)[64], uint32_t head, float (&sums)[2], uint4 of_tile) {
    uint32_t lane_2 = lane;
    float total = sums[0];
    total += shuffle_xor_f32(total, 1);
    total += shuffle_xor_f32(total, 2);
    float inverse = divide_f32(1.0f, total);
    uint32_t in_tile = warp * 16;
    uint32_t group = (of_tile.x + in_tile) / 8;
    if (in_tile + lane_2 / 4 < of_tile.z) {
      uint64_t block = (uint64_t)(head * 4 * (PASS_TOKENS / 8) + group) * GROUP_BYTES;
      uint8_t* unit = workspace + ATTENTION_AT + (block + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit))[0] = make_u32x4(pack_bf16x2(output[0] * inverse, output[1] * inverse), pack_bf16x2(output[4] * inverse, output[5] * inverse), pack_bf16x2(output[8] * inverse, output[9] * inverse), pack_bf16x2(output[12] * inverse, output[13] * inverse));
      uint64_t block_2 = (uint64_t)((head * 4 + 1) * (PASS_TOKENS / 8) + group) * GROUP_BYTES;
      uint8_t* unit_2 = workspace + ATTENTION_AT + (block_2 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_2))[0] = make_u32x4(pack_bf16x2(output[16] * inverse, output[17] * inverse), pack_bf16x2(output[20] * inverse, output[21] * inverse), pack_bf16x2(output[24] * inverse, output[25] * inverse), pack_bf16x2(output[28] * inverse, output[29] * inverse));
      uint64_t block_3 = (uint64_t)((head * 4 + 2) * (PASS_TOKENS / 8) + group) * GROUP_BYTES;
      uint8_t* unit_3 = workspace + ATTENTION_AT + (block_3 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_3))[0] = make_u32x4(pack_bf16x2(output[32] * inverse, output[33] * inverse), pack_bf16x2(output[36] * inverse, output[37] * inverse), pack_bf16x2(output[40] * inverse, output[41] * inverse), pack_bf16x2(output[44] * inverse, output[45] * inverse));
      uint64_t block_4 = (uint64_t)((head * 4 + 3) * (PASS_TOKENS / 8) + group) * GROUP_BYTES;
      uint8_t* unit_4 = workspace + ATTENTION_AT + (block_4 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_4))[0] = make_u32x4(pack_bf16x2(output[48] * inverse, output[49] * inverse), pack_bf16x2(output[52] * inverse, output[53] * inverse), pack_bf16x2(output[56] * inverse, output[57] * inverse), pack_bf16x2(output[60] * inverse, output[61] * inverse));
    }
    float total_2 = sums[1];
    total_2 += shuffle_xor_f32(total_2, 1);
    total_2 += shuffle_xor_f32(total_2, 2);
    float inverse_2 = divide_f32(1.0f, total_2);
    uint32_t in_tile_2 = warp * 16 + 8;
    uint32_t group_2 = (of_tile.x + in_tile_2) / 8;
    if (in_tile_2 + lane_2 / 4 < of_tile.z) {
      uint64_t block = (uint64_t)(head * 4 * (PASS_TOKENS / 8) + group_2) * GROUP_BYTES;
      uint8_t* unit = workspace + ATTENTION_AT + (block + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit))[0] = make_u32x4(pack_bf16x2(output[2] * inverse_2, output[3] * inverse_2), pack_bf16x2(output[6] * inverse_2, output[7] * inverse_2), pack_bf16x2(output[10] * inverse_2, output[11] * inverse_2), pack_bf16x2(output[14] * inverse_2, output[15] * inverse_2));
      uint64_t block_2 = (uint64_t)((head * 4 + 1) * (PASS_TOKENS / 8) + group_2) * GROUP_BYTES;
      uint8_t* unit_2 = workspace + ATTENTION_AT + (block_2 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_2))[0] = make_u32x4(pack_bf16x2(output[18] * inverse_2, output[19] * inverse_2), pack_bf16x2(output[22] * inverse_2, output[23] * inverse_2), pack_bf16x2(output[26] * inverse_2, output[27] * inverse_2), pack_bf16x2(output[30] * inverse_2, output[31] * inverse_2));
      uint64_t block_3 = (uint64_t)((head * 4 + 2) * (PASS_TOKENS / 8) + group_2) * GROUP_BYTES;
      uint8_t* unit_3 = workspace + ATTENTION_AT + (block_3 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_3))[0] = make_u32x4(pack_bf16x2(output[34] * inverse_2, output[35] * inverse_2), pack_bf16x2(output[38] * inverse_2, output[39] * inverse_2), pack_bf16x2(output[42] * inverse_2, output[43] * inverse_2), pack_bf16x2(output[46] * inverse_2, output[47] * inverse_2));
      uint64_t block_4 = (uint64_t)((head * 4 + 3) * (PASS_TOKENS / 8) + group_2) * GROUP_BYTES;
      uint8_t* unit_4 = workspace + ATTENTION_AT + (block_4 + (uint64_t)(lane_2 % 4 * UNIT_BYTES + lane_2 / 4 * 16));
      ((uint4*)(unit_4))[0] = make_u32x4(pack_bf16x2(output[50] * inverse_2, output[51] * inverse_2), pack_bf16x2(output[54] * inverse_2, output[55] * inverse_2), pack_bf16x2(output[58] * inverse_2, output[59] * inverse_2), pack_bf16x2(output[62] * inverse_2, output[63] * inverse_2));
    }
  }

  // In the consumer role: all tiles of this block.
  __device__ __forceinline__ void attend() {
    #pragma unroll 1
    for (uint32_t tile = block; tile < tile_count * 32; tile += BLOCKS) {
      uint4 of_tile = ((const uint4*)(tiles))[tile / 32];
      uint32_t end = (of_tile.y + of_tile.z + 31) / 32;
      uint32_t head = tile % 32;
      uint32_t first_of_warp = warp * 16;
      uint4 queries[8];
      load_queries(queries, head, of_tile.x + first_of_warp);
      uint32_t first_row = of_tile.y + first_of_warp;
      uint32_t position = first_row + lane / 4;
      float largest[2];
      float shrinks[2];
      float sums[2] = {};
      largest[0] = -infinity();
      largest[1] = -infinity();
      float output[64] = {};
      float logits[16];
      uint4 even[2];
      uint4 odd[2];
      uint32_t previous = stage;
      multiply_keys(logits, queries);
      wgmma_wait_all();
      weigh(logits, even, 0, first_row, position, largest, shrinks, sums);
      uint32_t others = end - 1;
      #pragma unroll 1
      for (uint32_t other = 0; other < others / 2 * 2; other += 2) {
        uint32_t key = (other + 1) * 32;
        go_on(logits, queries, output, even, odd, previous, key, first_row, position, largest, shrinks, sums);
        go_on(logits, queries, output, odd, even, previous, key + 32, first_row, position, largest, shrinks, sums);
      }
      if (others % 2 != 0) {
        go_on(logits, queries, output, even, odd, previous, (end - 1) * 32, first_row, position, largest, shrinks,
            sums);
        finish_values(output, odd, previous);
      } else {
        finish_values(output, even, previous);
      }
      store(output, head, sums, of_tile);
    }
  }

  // In the consumer role, all blocks together, for every segment: the keys and values that were cached before this
  // pass, in core order, and zeros for values behind the last one up to the end of its key tile, whose weights are
  // zero. So are those of keys that a window has left behind, in the key tile where the window of the segment's first
  // token begins: they may not be cached any more.
  __device__ __forceinline__ void bring_earlier_keys(uint32_t layer) {
    #pragma unroll 1
    for (uint32_t segment = 0; segment < segment_count; ++segment) {
      uint4 of_segment = ((const uint4*)(segments))[segment];
      uint32_t thread_2 = block * CONSUMERS + thread;
      uint32_t of_head = (of_segment.x + 7) / 8;
      uint32_t head_units = of_head * (HEAD_DIM / 8 * 8);
      #pragma unroll 1
      for (uint32_t index = thread_2; index < head_units * 8; index += BLOCKS * CONSUMERS) {
        uint32_t kv_head = index / head_units;
        uint32_t rest = index % head_units;
        uint32_t key = rest / (HEAD_DIM / 8 * 8) * 8 + rest % 8;
        uint32_t unit = rest / 8 % (HEAD_DIM / 8);
        uint64_t core = (uint64_t)(kv_head * (KEY_ROWS / 8) + (of_segment.w + key) / 8) * HEAD_GROUP_BYTES + (uint64_t)(unit * CORE_BYTES + (of_segment.w + key) % 8 * 16);
        if (key < of_segment.x) {
          uint32_t page = load_constant_u32(page_table + (of_segment.z + key / 16));
          uint64_t offset = (uint64_t)(layer * kv_pages + page) * (2 * TO_VALUES);
          bf16* key_2 = kv + (offset + (uint64_t)(kv_head * (16 * HEAD_DIM) + key % 16 * HEAD_DIM));
          bf16* source = key_2 + unit * 8;
          ((uint4*)(workspace + KEYS_AT + core))[0] = ((const uint4*)(source))[0];
          ((uint4*)(workspace + VALUES_AT + core))[0] = ((const uint4*)(source + TO_VALUES))[0];
        }
      }
      uint32_t thread_3 = block * CONSUMERS + thread;
      uint32_t total = of_segment.x + of_segment.y;
      uint32_t behind = (total + 31) / 32 * 32 - total;
      #pragma unroll 1
      for (uint32_t index = thread_3; index < behind * (HEAD_DIM / 8 * 8); index += BLOCKS * CONSUMERS) {
        uint32_t unit = index % (HEAD_DIM / 8);
        uint32_t kv_head = index / (HEAD_DIM / 8) % 8;
        uint64_t core = (uint64_t)(kv_head * (KEY_ROWS / 8) + (of_segment.w + total + index / (HEAD_DIM / 8 * 8)) / 8) * HEAD_GROUP_BYTES + (uint64_t)(unit * CORE_BYTES + (of_segment.w + total + index / (HEAD_DIM / 8 * 8)) % 8 * 16);
        ((uint4*)(workspace + VALUES_AT + core))[0] = make_u32x4(0, 0, 0, 0);
      }
    }
  }

  // By all consumer warps, once a tile.
  __device__ __forceinline__ void load(uint32_t token_tile) {
    turn_2 ^= 1;
    if (thread < 32) {
      uint32_t token = token_tile * 32 + thread;
      float total = 0.0f;
      #pragma unroll 32
      for (uint32_t part = 0; part < 32; ++part) {
        total += ((float*)(workspace + SQUARES_AT))[part * PASS_TOKENS + token];
      }
      float scale = rsqrt_f32(total * 0.000244140625f + 1e-05f);
      (scales_2 + turn_2 * 32)[thread] = scale;
    }
    named_barrier(1, CONSUMERS);
  }

  __device__ __forceinline__ void store_query(uint32_t head, uint32_t column, uint32_t unit, uint32_t word) {
    uint32_t pair = lane / 8;
    uint64_t offset = (uint64_t)((head * (PASS_TOKENS / 16) + column / 16) * 8 + unit / 2) * STEP_BYTES + (uint64_t)((column % 8 * 4 + pair) * 16 + (column / 8 % 2 + unit % 2 * 2) * 4);
    ((uint32_t*)(workspace + QUERIES_AT + offset))[0] = word;
  }

  __device__ __forceinline__ void store_kv(uint32_t head, uint32_t position, uint32_t table, uint32_t first_row,
      uint32_t unit, uint32_t word, uint32_t layer) {
    uint32_t pair = lane / 8;
    uint32_t kv_row = head - 32;
    uint32_t kv_head = kv_row % 8;
    bool is_key = kv_row < 8;
    uint64_t core = (uint64_t)(kv_head * (KEY_ROWS / 8) + (first_row + position) / 8) * HEAD_GROUP_BYTES + (uint64_t)(unit * CORE_BYTES + (first_row + position) % 8 * 16) + (uint64_t)(pair * 4);
    uint8_t* into = (is_key ? workspace + KEYS_AT : workspace + VALUES_AT) + core;
    ((uint32_t*)(into))[0] = word;
    uint32_t page = load_constant_u32(page_table + (table + position / 16));
    uint64_t offset = (uint64_t)(layer * kv_pages + page) * (2 * TO_VALUES);
    bf16* key = kv + (offset + (uint64_t)(kv_head * (16 * HEAD_DIM) + position % 16 * HEAD_DIM));
    bf16* cached = (is_key ? key : key + TO_VALUES) + (unit * 8 + pair * 2);
    ((uint32_t*)(cached))[0] = word;
  }

  __device__ __forceinline__ void finish(uint32_t m_tile, uint32_t in_tile, float sum, float sum_2, float sum_3,
      float sum_4, float2 angle, float2 angle_2, uint32_t of_pass, uint4 of_group, uint32_t layer) {
    uint32_t head = m_tile / 8;
    uint32_t m_tile_of_head = m_tile % 8;
    float rows[4];
    const float2* pairs = (const float2*)(scales_2 + turn_2 * 32);
    float2 scale = pairs[in_tile * 4 + lane % 4];
    rows[0] = sum * scale.x;
    rows[1] = sum_2 * scale.y;
    rows[2] = sum_3 * scale.x;
    rows[3] = sum_4 * scale.y;
    bool is_paired = head < 40;
    if (is_paired) {
      float first = rows[0];
      float second = rows[2];
      rows[0] = fma_f32(first, angle.x, -second * angle.y);
      rows[2] = fma_f32(second, angle.x, first * angle.y);
      float first_2 = rows[1];
      float second_2 = rows[3];
      rows[1] = fma_f32(first_2, angle_2.x, -second_2 * angle_2.y);
      rows[3] = fma_f32(second_2, angle_2.x, first_2 * angle_2.y);
    }
    bool is_odd = lane / 4 % 2 != 0;
    uint32_t mine = is_odd ? pack_bf16x2(rows[1], rows[3]) : pack_bf16x2(rows[0], rows[2]);
    uint32_t other = shuffle_xor_u32(is_odd ? pack_bf16x2(rows[0], rows[2]) : pack_bf16x2(rows[1], rows[3]), 4);
    uint32_t even = is_odd ? other : mine;
    uint32_t odd = is_odd ? mine : other;
    uint32_t low = byte_permute(even, odd, LOW_HALVES);
    uint32_t high = byte_permute(even, odd, HIGH_HALVES);
    uint32_t first_unit = is_paired ? m_tile_of_head : m_tile_of_head * 2;
    uint32_t second_unit = is_paired ? m_tile_of_head + 8 : m_tile_of_head * 2 + 1;
    uint32_t in_group = lane % 4 * 2 + lane / 4 % 2;
    if (head < 32) {
      store_query(head, of_pass * 8 + in_group, first_unit, low);
    } else if (in_group < of_group.y) {
      store_kv(head, of_group.x + in_group, of_group.z, of_group.w, first_unit, low, layer);
    }
    uint32_t in_group_2 = lane % 4 * 2 + lane / 4 % 2;
    if (head < 32) {
      store_query(head, of_pass * 8 + in_group_2, second_unit, high);
    } else if (in_group_2 < of_group.y) {
      store_kv(head, of_group.x + in_group_2, of_group.z, of_group.w, second_unit, high, layer);
    }
  }

  __device__ __forceinline__ void finish_groups(float (&sums)[16], uint32_t first, uint32_t token_tile, uint32_t m_tile,
      uint32_t layer) {
    #pragma unroll
    for (uint32_t group = first; group < first + 4; group += 4) {
      uint32_t of_pass = token_tile * 4 + group;
      uint32_t lane_2 = lane;
      uint4 of_group = ((const uint4*)(groups))[of_pass];
      uint32_t frequency = m_tile % 8 * 8 + lane_2 / 4;
      uint32_t position = min(of_group.x + lane_2 % 4 * 2, MAX_CONTEXT - 1);
      const float2* angles = (const float2*)(rope);
      float2 angle = angles[position * 64 + frequency];
      uint32_t position_2 = min(of_group.x + lane_2 % 4 * 2 + 1, MAX_CONTEXT - 1);
      const float2* angles_2 = (const float2*)(rope);
      float2 angle_2 = angles_2[position_2 * 64 + frequency];
      uint32_t lane_3 = lane;
      uint4 of_group_2 = ((const uint4*)(groups))[of_pass + 1];
      uint32_t frequency_2 = m_tile % 8 * 8 + lane_3 / 4;
      uint32_t position_3 = min(of_group_2.x + lane_3 % 4 * 2, MAX_CONTEXT - 1);
      const float2* angles_3 = (const float2*)(rope);
      float2 angle_3 = angles_3[position_3 * 64 + frequency_2];
      uint32_t position_4 = min(of_group_2.x + lane_3 % 4 * 2 + 1, MAX_CONTEXT - 1);
      const float2* angles_4 = (const float2*)(rope);
      float2 angle_4 = angles_4[position_4 * 64 + frequency_2];
      uint32_t lane_4 = lane;
      uint4 of_group_3 = ((const uint4*)(groups))[of_pass + 2];
      uint32_t frequency_3 = m_tile % 8 * 8 + lane_4 / 4;
      uint32_t position_5 = min(of_group_3.x + lane_4 % 4 * 2, MAX_CONTEXT - 1);
      const float2* angles_5 = (const float2*)(rope);
      float2 angle_5 = angles_5[position_5 * 64 + frequency_3];
      uint32_t position_6 = min(of_group_3.x + lane_4 % 4 * 2 + 1, MAX_CONTEXT - 1);
      const float2* angles_6 = (const float2*)(rope);
      float2 angle_6 = angles_6[position_6 * 64 + frequency_3];
      uint32_t lane_5 = lane;
      uint4 of_group_4 = ((const uint4*)(groups))[of_pass + 3];
      uint32_t frequency_4 = m_tile % 8 * 8 + lane_5 / 4;
      uint32_t position_7 = min(of_group_4.x + lane_5 % 4 * 2, MAX_CONTEXT - 1);
      const float2* angles_7 = (const float2*)(rope);
      float2 angle_7 = angles_7[position_7 * 64 + frequency_4];
      uint32_t position_8 = min(of_group_4.x + lane_5 % 4 * 2 + 1, MAX_CONTEXT - 1);
      const float2* angles_8 = (const float2*)(rope);
      float2 angle_8 = angles_8[position_8 * 64 + frequency_4];
      float sum = sums[group * 4];
      float sum_2 = sums[group * 4 + 1];
      float sum_3 = sums[group * 4 + 2];
      float sum_4 = sums[group * 4 + 3];
      uint32_t in_tile = group;
      uint32_t of_pass_2 = token_tile * 4 + in_tile;
      finish(m_tile, in_tile, sum, sum_2, sum_3, sum_4, angle, angle_2, of_pass_2, of_group, layer);
      float sum_5 = sums[(group + 1) * 4];
      float sum_6 = sums[(group + 1) * 4 + 1];
      float sum_7 = sums[(group + 1) * 4 + 2];
      float sum_8 = sums[(group + 1) * 4 + 3];
      uint32_t in_tile_2 = group + 1;
      uint32_t of_pass_3 = token_tile * 4 + in_tile_2;
      finish(m_tile, in_tile_2, sum_5, sum_6, sum_7, sum_8, angle_3, angle_4, of_pass_3, of_group_2, layer);
      float sum_9 = sums[(group + 2) * 4];
      float sum_10 = sums[(group + 2) * 4 + 1];
      float sum_11 = sums[(group + 2) * 4 + 2];
      float sum_12 = sums[(group + 2) * 4 + 3];
      uint32_t in_tile_3 = group + 2;
      uint32_t of_pass_4 = token_tile * 4 + in_tile_3;
      finish(m_tile, in_tile_3, sum_9, sum_10, sum_11, sum_12, angle_5, angle_6, of_pass_4, of_group_3, layer);
      float sum_13 = sums[(group + 3) * 4];
      float sum_14 = sums[(group + 3) * 4 + 1];
      float sum_15 = sums[(group + 3) * 4 + 2];
      float sum_16 = sums[(group + 3) * 4 + 3];
      uint32_t in_tile_4 = group + 3;
      uint32_t of_pass_5 = token_tile * 4 + in_tile_4;
      finish(m_tile, in_tile_4, sum_13, sum_14, sum_15, sum_16, angle_7, angle_8, of_pass_5, of_group_4, layer);
    }
  }

  // The 16 rows of an M-tile as 16 columns of a vector in token order, rounded to bf16.
  __device__ __forceinline__ void store_rows_of_few_tokens(uint8_t* into, float sum, float (&weights)[2], float sum_2,
      float sum_3, float sum_4, uint32_t m_tile, uint32_t of_pass) {
    uint2 words;
    bool is_odd = lane / 4 % 2 != 0;
    uint32_t mine = is_odd ? pack_bf16x2(bf16_to_f32(f32_to_bf16(sum)) * weights[0], bf16_to_f32(f32_to_bf16(sum_2)) * weights[1]) : pack_bf16x2(bf16_to_f32(f32_to_bf16(sum_3)) * weights[0], bf16_to_f32(f32_to_bf16(sum_4)) * weights[1]);
    uint32_t other = shuffle_xor_u32(is_odd ? pack_bf16x2(bf16_to_f32(f32_to_bf16(sum_3)) * weights[0], bf16_to_f32(f32_to_bf16(sum_4)) * weights[1]) : pack_bf16x2(bf16_to_f32(f32_to_bf16(sum)) * weights[0], bf16_to_f32(f32_to_bf16(sum_2)) * weights[1]), 4);
    uint32_t even = is_odd ? other : mine;
    uint32_t odd = is_odd ? mine : other;
    uint32_t low = byte_permute(even, odd, LOW_HALVES);
    uint32_t high = byte_permute(even, odd, HIGH_HALVES);
    words.x = low;
    words.y = high;
    uint32_t k_tile = m_tile / 2;
    uint32_t half = m_tile % 2;
    uint32_t row = lane / 4;
    uint32_t token = lane % 4 * 2 + lane / 4 % 2;
    uint64_t block = (uint64_t)(k_tile * (PASS_TOKENS / 8) + of_pass) * GROUP_BYTES;
    uint8_t* address = into + block + (uint64_t)(row / 2 * UNIT_BYTES + token * 16) + half * 8;
    ((uint2*)(address))[0] = words;
  }

  __device__ __forceinline__ void finish_groups_of_residual(float (&sums)[16], uint32_t first, uint32_t m_tile,
      uint32_t layer, uint32_t phase, uint32_t token_tile) {
    uint32_t row = m_tile * 16 + lane / 4;
    float weights[2];
    weights[0] = bf16_to_f32((norms + (layer * 2 + (phase <= 5 ? 1u : 2u)) * HIDDEN)[row]);
    weights[1] = bf16_to_f32((norms + (layer * 2 + (phase <= 5 ? 1u : 2u)) * HIDDEN)[row + 8]);
    #pragma unroll
    for (uint32_t group = first; group < first + 4; group += 4) {
      uint32_t of_pass = token_tile * 4 + group;
      float sum = sums[group * 4];
      float sum_2 = sums[group * 4 + 1];
      float sum_3 = sums[group * 4 + 2];
      float sum_4 = sums[group * 4 + 3];
      uint32_t in_tile = group;
      uint32_t of_pass_2 = token_tile * 4 + in_tile;
      uint64_t index = ((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_2)) * (ACCUMULATOR_BYTES / 16);
      float4 kept;
      kept.x = sum;
      kept.y = sum_2;
      kept.z = sum_3;
      kept.w = sum_4;
      ((float4*)((float*)(workspace + RESIDUAL_AT)))[index + (uint64_t)(lane)] = kept;
      float* of_lane = (float*)(arena + SQUARES) + (warp * 32 + lane * 2);
      float* kept_2 = of_lane;
      float square = fma_f32(bf16_to_f32(f32_to_bf16(sum)), bf16_to_f32(f32_to_bf16(sum)), bf16_to_f32(f32_to_bf16(sum_3)) * bf16_to_f32(f32_to_bf16(sum_3)));
      square += shuffle_xor_f32(square, 4);
      square += shuffle_xor_f32(square, 8);
      square += shuffle_xor_f32(square, 16);
      if (lane < 4) kept_2[in_tile * 8] = square;
      float square_2 = fma_f32(bf16_to_f32(f32_to_bf16(sum_2)), bf16_to_f32(f32_to_bf16(sum_2)), bf16_to_f32(f32_to_bf16(sum_4)) * bf16_to_f32(f32_to_bf16(sum_4)));
      square_2 += shuffle_xor_f32(square_2, 4);
      square_2 += shuffle_xor_f32(square_2, 8);
      square_2 += shuffle_xor_f32(square_2, 16);
      if (lane < 4) kept_2[in_tile * 8 + 1] = square_2;
      store_rows_of_few_tokens(workspace + HIDDEN_AT, sum_2, weights, sum_4, sum, sum_3, m_tile, of_pass_2);
      float sum_5 = sums[(group + 1) * 4];
      float sum_6 = sums[(group + 1) * 4 + 1];
      float sum_7 = sums[(group + 1) * 4 + 2];
      float sum_8 = sums[(group + 1) * 4 + 3];
      uint32_t in_tile_2 = group + 1;
      uint32_t of_pass_3 = token_tile * 4 + in_tile_2;
      uint64_t index_2 = ((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_3)) * (ACCUMULATOR_BYTES / 16);
      float4 kept_3;
      kept_3.x = sum_5;
      kept_3.y = sum_6;
      kept_3.z = sum_7;
      kept_3.w = sum_8;
      ((float4*)((float*)(workspace + RESIDUAL_AT)))[index_2 + (uint64_t)(lane)] = kept_3;
      float* of_lane_2 = (float*)(arena + SQUARES) + (warp * 32 + lane * 2);
      float* kept_4 = of_lane_2;
      float square_3 = fma_f32(bf16_to_f32(f32_to_bf16(sum_5)), bf16_to_f32(f32_to_bf16(sum_5)), bf16_to_f32(f32_to_bf16(sum_7)) * bf16_to_f32(f32_to_bf16(sum_7)));
      square_3 += shuffle_xor_f32(square_3, 4);
      square_3 += shuffle_xor_f32(square_3, 8);
      square_3 += shuffle_xor_f32(square_3, 16);
      if (lane < 4) kept_4[in_tile_2 * 8] = square_3;
      float square_4 = fma_f32(bf16_to_f32(f32_to_bf16(sum_6)), bf16_to_f32(f32_to_bf16(sum_6)), bf16_to_f32(f32_to_bf16(sum_8)) * bf16_to_f32(f32_to_bf16(sum_8)));
      square_4 += shuffle_xor_f32(square_4, 4);
      square_4 += shuffle_xor_f32(square_4, 8);
      square_4 += shuffle_xor_f32(square_4, 16);
      if (lane < 4) kept_4[in_tile_2 * 8 + 1] = square_4;
      store_rows_of_few_tokens(workspace + HIDDEN_AT, sum_6, weights, sum_8, sum_5, sum_7, m_tile, of_pass_3);
      float sum_9 = sums[(group + 2) * 4];
      float sum_10 = sums[(group + 2) * 4 + 1];
      float sum_11 = sums[(group + 2) * 4 + 2];
      float sum_12 = sums[(group + 2) * 4 + 3];
      uint32_t in_tile_3 = group + 2;
      uint32_t of_pass_4 = token_tile * 4 + in_tile_3;
      uint64_t index_3 = ((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_4)) * (ACCUMULATOR_BYTES / 16);
      float4 kept_5;
      kept_5.x = sum_9;
      kept_5.y = sum_10;
      kept_5.z = sum_11;
      kept_5.w = sum_12;
      ((float4*)((float*)(workspace + RESIDUAL_AT)))[index_3 + (uint64_t)(lane)] = kept_5;
      float* of_lane_3 = (float*)(arena + SQUARES) + (warp * 32 + lane * 2);
      float* kept_6 = of_lane_3;
      float square_5 = fma_f32(bf16_to_f32(f32_to_bf16(sum_9)), bf16_to_f32(f32_to_bf16(sum_9)), bf16_to_f32(f32_to_bf16(sum_11)) * bf16_to_f32(f32_to_bf16(sum_11)));
      square_5 += shuffle_xor_f32(square_5, 4);
      square_5 += shuffle_xor_f32(square_5, 8);
      square_5 += shuffle_xor_f32(square_5, 16);
      if (lane < 4) kept_6[in_tile_3 * 8] = square_5;
      float square_6 = fma_f32(bf16_to_f32(f32_to_bf16(sum_10)), bf16_to_f32(f32_to_bf16(sum_10)), bf16_to_f32(f32_to_bf16(sum_12)) * bf16_to_f32(f32_to_bf16(sum_12)));
      square_6 += shuffle_xor_f32(square_6, 4);
      square_6 += shuffle_xor_f32(square_6, 8);
      square_6 += shuffle_xor_f32(square_6, 16);
      if (lane < 4) kept_6[in_tile_3 * 8 + 1] = square_6;
      store_rows_of_few_tokens(workspace + HIDDEN_AT, sum_10, weights, sum_12, sum_9, sum_11, m_tile, of_pass_4);
      float sum_13 = sums[(group + 3) * 4];
      float sum_14 = sums[(group + 3) * 4 + 1];
      float sum_15 = sums[(group + 3) * 4 + 2];
      float sum_16 = sums[(group + 3) * 4 + 3];
      uint32_t in_tile_4 = group + 3;
      uint32_t of_pass_5 = token_tile * 4 + in_tile_4;
      uint64_t index_4 = ((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_5)) * (ACCUMULATOR_BYTES / 16);
      float4 kept_7;
      kept_7.x = sum_13;
      kept_7.y = sum_14;
      kept_7.z = sum_15;
      kept_7.w = sum_16;
      ((float4*)((float*)(workspace + RESIDUAL_AT)))[index_4 + (uint64_t)(lane)] = kept_7;
      float* of_lane_4 = (float*)(arena + SQUARES) + (warp * 32 + lane * 2);
      float* kept_8 = of_lane_4;
      float square_7 = fma_f32(bf16_to_f32(f32_to_bf16(sum_13)), bf16_to_f32(f32_to_bf16(sum_13)), bf16_to_f32(f32_to_bf16(sum_15)) * bf16_to_f32(f32_to_bf16(sum_15)));
      square_7 += shuffle_xor_f32(square_7, 4);
      square_7 += shuffle_xor_f32(square_7, 8);
      square_7 += shuffle_xor_f32(square_7, 16);
      if (lane < 4) kept_8[in_tile_4 * 8] = square_7;
      float square_8 = fma_f32(bf16_to_f32(f32_to_bf16(sum_14)), bf16_to_f32(f32_to_bf16(sum_14)), bf16_to_f32(f32_to_bf16(sum_16)) * bf16_to_f32(f32_to_bf16(sum_16)));
      square_8 += shuffle_xor_f32(square_8, 4);
      square_8 += shuffle_xor_f32(square_8, 8);
      square_8 += shuffle_xor_f32(square_8, 16);
      if (lane < 4) kept_8[in_tile_4 * 8 + 1] = square_8;
      store_rows_of_few_tokens(workspace + HIDDEN_AT, sum_14, weights, sum_16, sum_13, sum_15, m_tile, of_pass_5);
    }
  }

  // In the consumer role: the sums of the product of `phase`, finished as its case says.
  __device__ __forceinline__ void finish_of_three_cases(uint32_t phase, float* parts, uint32_t layer, float* residual,
      uint32_t phase_2) {
    uint32_t row_tiles = phase == 7 ? DOWN_ROWS / 16 / 8 : (phase == 4 ? O_ROWS / 16 / 8 : QKV_ROWS / 16 / 8);
    #pragma unroll 1
    for (uint32_t tile = block; tile < of_few * row_tiles; tile += BLOCKS) {
      uint32_t row_tile = tile / of_few;
      uint32_t token_tile = tile % of_few;
      uint32_t m_tile = row_tile * 8 + warp;
      float sums[16] = {};
      if (phase == 1) {
        if (m_tile < QKV_ROWS / 16) {
          #pragma unroll 2
          for (uint32_t part = 0; part < 2; ++part) {
            const float4* words = (const float4*)(parts);
            #pragma unroll
            for (uint32_t group = 0; group < 4; ++group) {
              float4 added = words[((uint64_t)(part * (QKV_ROWS / 16) + m_tile) * (PASS_TOKENS / 8) + (uint64_t)(token_tile * 4 + group)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane)];
              sums[group * 4] = sums[group * 4] + added.x;
              sums[group * 4 + 1] = sums[group * 4 + 1] + added.y;
              sums[group * 4 + 2] = sums[group * 4 + 2] + added.z;
              sums[group * 4 + 3] = sums[group * 4 + 3] + added.w;
            }
          }
        }
        load(token_tile);
        if (m_tile < QKV_ROWS / 16) finish_groups(sums, 0, token_tile, m_tile, layer);
      }
      if (phase == 4 || phase == 7) {
        if (m_tile < O_ROWS / 16) {
          const float4* words = (const float4*)(residual);
          #pragma unroll
          for (uint32_t group = 0; group < 4; ++group) {
            float4 added = words[((uint64_t)(m_tile) * (PASS_TOKENS / 8) + (uint64_t)(token_tile * 4 + group)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane)];
            sums[group * 4] = sums[group * 4] + added.x;
            sums[group * 4 + 1] = sums[group * 4 + 1] + added.y;
            sums[group * 4 + 2] = sums[group * 4 + 2] + added.z;
            sums[group * 4 + 3] = sums[group * 4 + 3] + added.w;
          }
          #pragma unroll 2
          for (uint32_t part = 0; part < 4; ++part) {
            const float4* words_2 = (const float4*)(parts);
            #pragma unroll
            for (uint32_t group = 0; group < 4; ++group) {
              float4 added = words_2[((uint64_t)(part * (O_ROWS / 16) + m_tile) * (PASS_TOKENS / 8) + (uint64_t)(token_tile * 4 + group)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane)];
              sums[group * 4] = sums[group * 4] + added.x;
              sums[group * 4 + 1] = sums[group * 4 + 1] + added.y;
              sums[group * 4 + 2] = sums[group * 4 + 2] + added.z;
              sums[group * 4 + 3] = sums[group * 4 + 3] + added.w;
            }
          }
        }
        if (m_tile < O_ROWS / 16) finish_groups_of_residual(sums, 0, m_tile, layer, phase_2, token_tile);
        end(row_tile, token_tile);
      }
    }
  }

  // By all consumer warps, once a tile.
  __device__ __forceinline__ void load_of_tiles(uint32_t token_tile) {
    turn ^= 1;
    if (thread < TILE_TOKENS) {
      uint32_t token = token_tile * TILE_TOKENS + thread;
      float total = 0.0f;
      #pragma unroll 32
      for (uint32_t part = 0; part < 32; ++part) {
        total += ((float*)(workspace + SQUARES_AT))[part * PASS_TOKENS + token];
      }
      float scale = rsqrt_f32(total * 0.000244140625f + 1e-05f);
      (scales + turn * TILE_TOKENS)[thread] = scale;
    }
    named_barrier(1, CONSUMERS);
  }

  // The same of the first stage, before which there is none to wait for.
  __device__ __forceinline__ void multiply_first_stage(float (&sums)[TILE_TOKENS / 8 * 4], uint4 (&fragments)[4],
      uint32_t& previous) {
    uint32_t stage_2 = stage;
    mbarrier_wait(full + stage, parity);
    uint8_t* memory = ring + stage_2 * STAGE_BYTES;
    fragments[0] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[lane];
    fragments[1] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[32 + lane];
    fragments[2] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[64 + lane];
    fragments[3] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[96 + lane];
    wgmma_fence();
    uint64_t descriptor = matrix_descriptor(memory + STAGE_WEIGHTS_BYTES, UNIT_BYTES, GROUP_BYTES);
    wgmma_bf16_n128(sums, fragments[0], descriptor, 0);
    wgmma_bf16_n128(sums, fragments[1], descriptor + 2 * UNIT_BYTES / 16, 1);
    wgmma_bf16_n128(sums, fragments[2], descriptor + ACTIVATION_TILE_BYTES / 16, 1);
    wgmma_bf16_n128(sums, fragments[3], descriptor + (ACTIVATION_TILE_BYTES + 2 * UNIT_BYTES) / 16, 1);
    wgmma_commit();
    previous = stage_2;
    advance(stage, parity, 6);
  }

  // Issue the products of a stage's K-tiles, then wait for those of the stage before and give that back.
  __device__ __forceinline__ void multiply_stage(float (&sums)[TILE_TOKENS / 8 * 4], uint4 (&fragments)[4],
      uint32_t& previous) {
    uint32_t stage_2 = stage;
    mbarrier_wait(full + stage, parity);
    uint8_t* memory = ring + stage_2 * STAGE_BYTES;
    fragments[0] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[lane];
    fragments[1] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[32 + lane];
    fragments[2] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[64 + lane];
    fragments[3] = ((const uint4*)(memory + warp * BF16_SLOT_TILE_BYTES))[96 + lane];
    wgmma_fence();
    uint64_t descriptor = matrix_descriptor(memory + STAGE_WEIGHTS_BYTES, UNIT_BYTES, GROUP_BYTES);
    wgmma_bf16_n128(sums, fragments[0], descriptor, 1);
    wgmma_bf16_n128(sums, fragments[1], descriptor + 2 * UNIT_BYTES / 16, 1);
    wgmma_bf16_n128(sums, fragments[2], descriptor + ACTIVATION_TILE_BYTES / 16, 1);
    wgmma_bf16_n128(sums, fragments[3], descriptor + (ACTIVATION_TILE_BYTES + 2 * UNIT_BYTES) / 16, 1);
    wgmma_commit();
    wgmma_wait_but_one();
    warp_barrier();
    if (lane == 0) mbarrier_arrive(empty + previous);
    previous = stage_2;
    advance(stage, parity, 6);
  }

  __device__ __forceinline__ void finish_groups_of_parts(float (&sums)[TILE_TOKENS / 8 * 4], uint32_t first,
      uint32_t token_tile, uint32_t m_tile, uint32_t before) {
    #pragma unroll
    for (uint32_t group = first; group < first + TILE_TOKENS / 8; group += 4) {
      uint32_t of_pass = token_tile * (TILE_TOKENS / 8) + group;
      float sum = sums[group * 4];
      float sum_2 = sums[group * 4 + 1];
      float sum_3 = sums[group * 4 + 2];
      float sum_4 = sums[group * 4 + 3];
      uint32_t in_tile = group;
      uint32_t of_pass_2 = token_tile * (TILE_TOKENS / 8) + in_tile;
      float4 kept;
      kept.x = sum;
      kept.y = sum_2;
      kept.z = sum_3;
      kept.w = sum_4;
      uint64_t place = ((uint64_t)(m_tile + before) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_2)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane);
      ((float4*)((float*)(workspace + PARTS_AT)))[place] = kept;
      float sum_5 = sums[(group + 1) * 4];
      float sum_6 = sums[(group + 1) * 4 + 1];
      float sum_7 = sums[(group + 1) * 4 + 2];
      float sum_8 = sums[(group + 1) * 4 + 3];
      uint32_t in_tile_2 = group + 1;
      uint32_t of_pass_3 = token_tile * (TILE_TOKENS / 8) + in_tile_2;
      float4 kept_2;
      kept_2.x = sum_5;
      kept_2.y = sum_6;
      kept_2.z = sum_7;
      kept_2.w = sum_8;
      uint64_t place_2 = ((uint64_t)(m_tile + before) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_3)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane);
      ((float4*)((float*)(workspace + PARTS_AT)))[place_2] = kept_2;
      float sum_9 = sums[(group + 2) * 4];
      float sum_10 = sums[(group + 2) * 4 + 1];
      float sum_11 = sums[(group + 2) * 4 + 2];
      float sum_12 = sums[(group + 2) * 4 + 3];
      uint32_t in_tile_3 = group + 2;
      uint32_t of_pass_4 = token_tile * (TILE_TOKENS / 8) + in_tile_3;
      float4 kept_3;
      kept_3.x = sum_9;
      kept_3.y = sum_10;
      kept_3.z = sum_11;
      kept_3.w = sum_12;
      uint64_t place_3 = ((uint64_t)(m_tile + before) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_4)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane);
      ((float4*)((float*)(workspace + PARTS_AT)))[place_3] = kept_3;
      float sum_13 = sums[(group + 3) * 4];
      float sum_14 = sums[(group + 3) * 4 + 1];
      float sum_15 = sums[(group + 3) * 4 + 2];
      float sum_16 = sums[(group + 3) * 4 + 3];
      uint32_t in_tile_4 = group + 3;
      uint32_t of_pass_5 = token_tile * (TILE_TOKENS / 8) + in_tile_4;
      float4 kept_4;
      kept_4.x = sum_13;
      kept_4.y = sum_14;
      kept_4.z = sum_15;
      kept_4.w = sum_16;
      uint64_t place_4 = ((uint64_t)(m_tile + before) * (PASS_TOKENS / 8) + (uint64_t)(of_pass_5)) * (ACCUMULATOR_BYTES / 16) + (uint64_t)(lane);
      ((float4*)((float*)(workspace + PARTS_AT)))[place_4] = kept_4;
    }
  }

  // silu(gate) * up of an M-tile's 8 gate rows and their up rows, as 8 columns of a vector in token order.
  __device__ __forceinline__ void store_gated(uint8_t* into, float sum, float2 scale, float sum_2, float sum_3,
      float sum_4, uint32_t m_tile, uint32_t before, uint32_t of_pass) {
    float first = sum * scale.x;
    float second = sum_2 * scale.y;
    float third = sum_3 * scale.x;
    float fourth = sum_4 * scale.y;
    uint32_t pair = pack_bf16x2(divide_f32(first, 1.0f + exp_f32(-first)) * third, divide_f32(second, 1.0f + exp_f32(-second)) * fourth);
    bool is_odd = lane / 4 % 2 != 0;
    uint32_t mine = is_odd ? pair : pair;
    uint32_t other = shuffle_xor_u32(is_odd ? pair : pair, 4);
    uint32_t even = is_odd ? other : mine;
    uint32_t odd = is_odd ? mine : other;
    bool is_odd_2 = lane / 4 % 2 != 0;
    uint32_t word = is_odd_2 ? byte_permute(even, odd, HIGH_HALVES) : byte_permute(even, odd, LOW_HALVES);
    uint32_t row = lane / 4;
    uint32_t token = lane % 4 * 2 + lane / 4 % 2;
    uint64_t block = (uint64_t)((m_tile + before) / 4 * (PASS_TOKENS / 8) + of_pass) * GROUP_BYTES;
    uint8_t* address = into + block + (uint64_t)(row / 2 * UNIT_BYTES + token * 16) + (m_tile + before) % 4 * 4;
    ((uint32_t*)(address))[0] = word;
  }

  __device__ __forceinline__ void finish_groups_of_gated(float (&sums)[TILE_TOKENS / 8 * 4], uint32_t first,
      uint32_t token_tile, uint32_t m_tile, uint32_t before) {
    #pragma unroll
    for (uint32_t group = first; group < first + TILE_TOKENS / 8; group += 4) {
      uint32_t of_pass = token_tile * (TILE_TOKENS / 8) + group;
      float sum = sums[group * 4];
      float sum_2 = sums[group * 4 + 1];
      float sum_3 = sums[group * 4 + 2];
      float sum_4 = sums[group * 4 + 3];
      uint32_t in_tile = group;
      uint32_t of_pass_2 = token_tile * (TILE_TOKENS / 8) + in_tile;
      const float2* pairs = (const float2*)(scales + turn * TILE_TOKENS);
      float2 scale = pairs[in_tile * 4 + lane % 4];
      store_gated(workspace + GATED_AT, sum, scale, sum_2, sum_3, sum_4, m_tile, before, of_pass_2);
      float sum_5 = sums[(group + 1) * 4];
      float sum_6 = sums[(group + 1) * 4 + 1];
      float sum_7 = sums[(group + 1) * 4 + 2];
      float sum_8 = sums[(group + 1) * 4 + 3];
      uint32_t in_tile_2 = group + 1;
      uint32_t of_pass_3 = token_tile * (TILE_TOKENS / 8) + in_tile_2;
      const float2* pairs_2 = (const float2*)(scales + turn * TILE_TOKENS);
      float2 scale_2 = pairs_2[in_tile_2 * 4 + lane % 4];
      store_gated(workspace + GATED_AT, sum_5, scale_2, sum_6, sum_7, sum_8, m_tile, before, of_pass_3);
      float sum_9 = sums[(group + 2) * 4];
      float sum_10 = sums[(group + 2) * 4 + 1];
      float sum_11 = sums[(group + 2) * 4 + 2];
      float sum_12 = sums[(group + 2) * 4 + 3];
      uint32_t in_tile_3 = group + 2;
      uint32_t of_pass_4 = token_tile * (TILE_TOKENS / 8) + in_tile_3;
      const float2* pairs_3 = (const float2*)(scales + turn * TILE_TOKENS);
      float2 scale_3 = pairs_3[in_tile_3 * 4 + lane % 4];
      store_gated(workspace + GATED_AT, sum_9, scale_3, sum_10, sum_11, sum_12, m_tile, before, of_pass_4);
      float sum_13 = sums[(group + 3) * 4];
      float sum_14 = sums[(group + 3) * 4 + 1];
      float sum_15 = sums[(group + 3) * 4 + 2];
      float sum_16 = sums[(group + 3) * 4 + 3];
      uint32_t in_tile_4 = group + 3;
      uint32_t of_pass_5 = token_tile * (TILE_TOKENS / 8) + in_tile_4;
      const float2* pairs_4 = (const float2*)(scales + turn * TILE_TOKENS);
      float2 scale_4 = pairs_4[in_tile_4 * 4 + lane % 4];
      store_gated(workspace + GATED_AT, sum_13, scale_4, sum_14, sum_15, sum_16, m_tile, before, of_pass_5);
    }
  }

  // In the consumer role: the product of `phase`. All share one main loop: with one for each, a kernel took four
  // times as long to compile, and ptxas found no registers for its accumulators.
  __device__ __forceinline__ void multiply(uint32_t phase) {
    uint32_t row_tiles = phase == 6 ? DOWN_ROWS / 16 / 8 * 4 : (phase == 5 ? GATE_UP_ROWS / 16 / 7 : (phase == 3 ? O_ROWS / 16 / 8 * 4 : QKV_ROWS / 16 / 6 * 2));
    uint32_t height = phase == 6 ? 8 : (phase == 5 ? 7 : (phase == 3 ? 8u : 6u));
    uint32_t parts = phase == 6 ? 4 : (phase == 5 ? 1 : (phase == 3 ? 4u : 2u));
    #pragma unroll 1
    for (uint32_t tile = block; tile < token_tiles * row_tiles; tile += BLOCKS) {
      uint32_t row_tile = tile / token_tiles / parts;
      uint32_t part = tile / token_tiles % parts;
      uint32_t token_tile = tile % token_tiles;
      uint32_t m_tile = row_tile * height + warp;
      float sums[TILE_TOKENS / 8 * 4];
      if (phase == 0 || phase == 3 || phase == 6) {
      }
      if (phase == 5) load_of_tiles(token_tile);
      uint4 even[4];
      uint4 odd[4];
      uint32_t previous = 0;
      multiply_first_stage(sums, even, previous);
      uint32_t pairs = phase == 6 ? (DOWN_COLUMNS / 32 / 4 - 2) / 4 : (phase == 5 ? (GATE_UP_COLUMNS / 32 - 2) / 4 : (phase == 3 ? (O_COLUMNS / 32 / 4 - 2) / 4 : (QKV_COLUMNS / 32 / 2 - 2) / 4));
      #pragma unroll 1
      for (uint32_t i = 0; i < pairs; ++i) {
        multiply_stage(sums, odd, previous);
        multiply_stage(sums, even, previous);
      }
      multiply_stage(sums, odd, previous);
      wgmma_wait_all();
      warp_barrier();
      if (lane == 0) mbarrier_arrive(empty + previous);
      if (phase == 0 || phase == 3 || phase == 6) {
        uint32_t m_tiles = phase == 6 ? DOWN_ROWS / 16 : (phase == 3 ? O_ROWS / 16 : QKV_ROWS / 16);
        uint32_t before = part * m_tiles;
        uint32_t m_tiles_2 = min(m_tiles, (row_tile + 1) * height);
        if (m_tile < m_tiles_2) finish_groups_of_parts(sums, 0, token_tile, m_tile, before);
      }
      if (phase == 5) {
        uint32_t before = part * (GATE_UP_ROWS / 16);
        uint32_t m_tiles = min(GATE_UP_ROWS / 16, (row_tile + 1) * height);
        if (m_tile < m_tiles) finish_groups_of_gated(sums, 0, token_tile, m_tile, before);
      }
    }
  }

  // Of every wanted column the residual stream, rounded to bf16, in natural order; a thread an element.
  __device__ __forceinline__ void store_hidden_states() {
    float* residual = (float*)(workspace + RESIDUAL_AT);
    uint32_t first = block * CONSUMERS + thread;
    #pragma unroll 1
    for (uint32_t place = first; place < wanted_count * HIDDEN; place += BLOCKS * CONSUMERS) {
      uint32_t row = place % HIDDEN;
      uint32_t column = (uint32_t)(wanted[place / HIDDEN]);
      uint32_t in_bounds = min(row, HIDDEN - 1);
      uint32_t lane = in_bounds % 8 * 4 + column % 8 / 2;
      uint32_t member = in_bounds % 16 / 8 * 2 + column % 2;
      uint64_t sums = (uint64_t)(in_bounds / 16) * (PASS_TOKENS / 8) + (uint64_t)(column / 8);
      float value = residual[sums * (ACCUMULATOR_BYTES / 4) + (uint64_t)(lane * 4 + member)];
      float kept = row < HIDDEN ? value : 0.0f;
      hidden_states[(uint64_t)(place)] = f32_to_bf16(kept);
    }
  }

  __device__ __forceinline__ void run() {
    arena = shared_arena();
    block = blockIdx.x;
    thread = threadIdx.x;
    warp = thread / 32;
    lane = thread % 32;
    token_tiles = (column_count + (TILE_TOKENS - 1)) / TILE_TOKENS;
    full = (uint64_t*)(arena + RING_BARRIERS);
    empty = full + 6;
    ring = arena + RING;
    of_few = (column_count + 31) / 32;
    if (thread == 0) {
      for (uint32_t stage = 0; stage < 6; ++stage) {
        mbarrier_init(full + stage, 2);
        mbarrier_init(empty + stage, 8);
      }
      mbarrier_fence_init();
    }
    block_barrier();
    if (warp >= 8) {
      give_registers();
      if (warp == 8) {
        // the weights: a lane an M-tile of the tile
        weights_stage = 0;
        weights_parity = 1;
        for (uint32_t layer = 0; layer < 32; ++layer) {
          renew();
          copy_weights(QKV, (uint64_t)(layer) * LAYER_BYTES);
          if (layer + 1 == 32 && wanted_count == 0) break;
          copy_nothing();
          renew();
          copy_weights_of_o(O, (uint64_t)(layer) * LAYER_BYTES + O_OFFSET);
          renew();
          copy_weights_of_gate_up(GATE_UP, (uint64_t)(layer) * LAYER_BYTES + GATE_UP_OFFSET);
          renew();
          copy_weights_of_o(DOWN, (uint64_t)(layer) * LAYER_BYTES + DOWN_OFFSET);
        }
      }
      if (thread == CONSUMERS + 32) {
        // the activations: one lane
        activations_stage = 0;
        activations_parity = 1;
        uint64_t copies_due = arrivals;
        for (uint32_t layer = 0; layer < 32; ++layer) {
          renew();
          copies_due += BLOCKS;
          wait_at_least_u64((uint64_t*)(workspace), copies_due);
          fence_proxy_async();
          copy_activations(QKV, workspace + HIDDEN_AT);
          copies_due += BLOCKS;
          if (layer + 1 == 32 && wanted_count == 0) break;
          copies_due += BLOCKS;
          wait_at_least_u64((uint64_t*)(workspace), copies_due);
          fence_proxy_async();
          copy_keys();
          renew();
          copies_due += BLOCKS;
          wait_at_least_u64((uint64_t*)(workspace), copies_due);
          fence_proxy_async();
          copy_activations(O, workspace + ATTENTION_AT);
          copies_due += BLOCKS;
          renew();
          copies_due += BLOCKS;
          wait_at_least_u64((uint64_t*)(workspace), copies_due);
          fence_proxy_async();
          copy_activations(GATE_UP, workspace + HIDDEN_AT);
          renew();
          copies_due += BLOCKS;
          wait_at_least_u64((uint64_t*)(workspace), copies_due);
          fence_proxy_async();
          copy_activations(DOWN, workspace + GATED_AT);
          copies_due += BLOCKS;
        }
      }
    } else {
      take_registers();
      // the warpgroups that multiply
      stage = 0;
      parity = 0;
      uint64_t arrivals_due = arrivals;
      turn = 0;
      scales = (float*)(arena + SCALES);
      turn_2 = 0;
      scales_2 = (float*)(arena + SCALES);
      // embedding
      embed();
      // grid barrier
      fence_proxy_async();
      named_barrier(1, CONSUMERS);
      arrivals_due += BLOCKS;
      if (thread == 0) add_release_u64((uint64_t*)(workspace), 1);
      for (uint32_t layer = 0; layer < 32; ++layer) {
        uint32_t phases = layer + 1 == 32 && wanted_count == 0 ? 2u : 8u;
        // phase 0, qkv: reads hidden; makes parts
        // phase 1, qkv-sums: reads parts, squares; makes queries, keys, values
        // phase 2, attention: reads queries, keys, values; makes attention
        // phase 3, o: reads attention; makes parts
        // phase 4, o-sums: reads parts, residual; makes residual, hidden, squares
        // phase 5, gate_up: reads hidden, squares; makes gated
        // phase 6, down: reads gated; makes parts
        // phase 7, down-sums: reads parts, residual; makes residual, hidden, squares
        #pragma unroll 1
        for (uint32_t phase = 0; phase < phases; ++phase) {
          renew();
          uint32_t number = layer * 8 + phase + 1;
          if (thread == 0) wait_at_least_u64((uint64_t*)(workspace), arrivals_due);
          named_barrier(1, CONSUMERS);
          if (phase == 2) {
            attend();
          } else {
            if (phase == 0) bring_earlier_keys(layer);
            bool is_sum = phase == 1;
            bool is_sum_2 = is_sum || phase == 4;
            bool is_sum_3 = is_sum_2 || phase == 7;
            if (is_sum_3) {
              float* parts = (float*)(workspace + PARTS_AT);
              float* residual = (float*)(workspace + RESIDUAL_AT);
              finish_of_three_cases(phase, parts, layer, residual, phase);
            } else {
              multiply(phase);
            }
          }
          // grid barrier
          fence_proxy_async();
          named_barrier(1, CONSUMERS);
          arrivals_due += BLOCKS;
          if (thread == 0) add_release_u64((uint64_t*)(workspace), 1);
        }
      }
      if (wanted_count != 0) {
        renew();
        if (thread == 0) wait_at_least_u64((uint64_t*)(workspace), arrivals_due);
        named_barrier(1, CONSUMERS);
        store_hidden_states();
        // grid barrier
        fence_proxy_async();
        named_barrier(1, CONSUMERS);
        arrivals_due += BLOCKS;
        if (thread == 0) add_release_u64((uint64_t*)(workspace), 1);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) prompt_pass(const uint8_t* weights, const bf16* norms,
    const bf16* embedding, const float* rope, bf16* kv, const int32_t* page_table, uint32_t kv_pages,
    const int32_t* ids, const int32_t* groups, const int32_t* segments, const int32_t* tiles, uint8_t* workspace,
    const int32_t* wanted, bf16* hidden_states, uint32_t column_count, uint32_t segment_count, uint32_t tile_count,
    uint32_t wanted_count, uint64_t arrivals) {
  PromptPass{weights, norms, embedding, rope, kv, page_table, kv_pages, ids, groups, segments, tiles, workspace, wanted,
      hidden_states, column_count, segment_count, tile_count, wanted_count, arrivals}.run();
}
