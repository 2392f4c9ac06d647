// The producer's loads: it waits until a buffer of a ring is empty, and issues the TMA copy that fills it.
#pragma once
#include "attention/descale.cuh"
#include "attention/pages.cuh"
#include "device/dependent_launch.cuh"
#include "sm90/common/work_tiles.cuh"
#include "sm90/forward/maps/mask_words.cuh"
#include "sm90/forward/rings.cuh"
#include "sm90/forward/values.cuh"
#include "sm90/ptx/tma.cuh"

// What the descales make of the codes of a head.
__device__ __forceinline__ HeadOfCodes head_of_codes(const ForwardParams& p, int batch, int head) {
  const int kv_head = head / p.group;
  const ProductScale scale = product_scale(p, batch, kv_head);
  const float values = value_descale(p, batch, kv_head) * (kCentersV ? 2 : 1);  // products of W add up to half of O
  return {scale.of_products, scale.of_scores, values, batch * (p.hq / p.group) + kv_head};
}

// Where the keys of a q tile lie. The division by the heads of a group is made once for all of its tiles: it takes
// longer than the rest of a load.
struct Keys {
  int first, count;  // in K and V, or in the list of pages
  int head, batch;
  int bias_head, bias_batch;  // where the bias of the q head lies
  long long image;            // the first tile in the image of V, kCentersV
  int means;                  // the kv head counted over the batch, kCentersV
};

__device__ __forceinline__ Keys keys_of(const ForwardParams& p, const QTile& tile, const Lengths& n) {
  return {n.k_start, n.sk, tile.head / p.group, kPackedK ? 0 : tile.batch, p.bias.head == 0 ? 0 : tile.head,
          p.bias.batch == 0 ? 0 : tile.batch,
          kCentersV ? first_image_tile(p, tile.batch, tile.head / p.group, n.k_start) : 0,
          kCentersV ? tile.batch * (p.hq / p.group) + tile.head / p.group : 0};
}

// Prefetches the means of V that threads will add at the end of a q tile.
__device__ __forceinline__ void prefetch_means(const ForwardParams& p, int kv_head, const KeyTiles& keys) {
  constexpr int kLineFloats = 32;
  const float* const means = means_of(p, kv_head);
  const int first = keys.begin / kSegmentTiles, end = (keys.end - 1) / kSegmentTiles + 1;
  const int begin = kMeanSteps > 0 ? (first / kSegmentsOfStep + kMeanSteps) * kSegmentsOfStep : first;
#pragma unroll 1
  for (int i = begin * kValueDim + threadIdx.x % 32 * kLineFloats; i < end * kValueDim; i += 32 * kLineFloats)
    prefetch_global(means + i);
}

// Where the words of a strip begin in a mask of bits: those of key tile 0. Of a strip that does not exist any will do.
template <class Params>
__device__ __forceinline__ const u32* mask_words_of_strip(const Params& p, const Keys& keys, int row) {
  const MaskBits& bits = p.expression.bits;
  return bits.words + keys.bias_batch * bits.batch + keys.bias_head * bits.head +
         (row < p.sq ? row / kStripRows : 0) * bits.strip;
}

// The producer's side of the rings. Each load waits until its buffer is empty, issues its TMA copies and returns.
struct Loader {
  const ForwardParams& p;
  u32 smem;
  QBuffers q;
  KBuffers k;
  VBuffers v;
  u32 tail_parity = 0;

  __device__ __forceinline__ Loader(const ForwardParams& p, u32 smem)
      : p(p), smem(smem), q(smem, 1), k(smem, 1), v(smem, 1) {}

  // The strips of a q tile and their Views; strip_of(i) is the strip of warpgroup i. After the last q tile come Views
  // without Q, which end the work. `keys`: the key tiles, or with kMapsTiles a FirstTile.
  template <class Tiles, class StripOf>
  __device__ __forceinline__ void load_q(const QTile& tile, const Lengths& n, const Tiles& keys, StripOf strip_of) {
    q.wait_empty();
    const u32 full = q.full();
    const u32 buffer = q.address();
    if (elect_one()) {
      HeadOfCodes head = {};
      if (kHasCodes && tile.block >= 0) head = head_of_codes(p, tile.batch, tile.head);
      int strips = kConsumers;  // with a bias in P there are no registers for more than one View at a time
      if constexpr (kBiasInP) asm volatile("" : "+r"(strips));
#pragma unroll
      for (int strip = 0; strip < strips; ++strip) {
        View view;
        if constexpr (kMapsTiles)
          view = view_of_published_tiles(band_of(p), n, tile, keys.packed[strip], strip_of(strip));
        else view = view_of(band_of(p), n, kBlockKeys, tile, keys, strip_of(strip));
        store_shared_struct(view_address(smem, q.ring.stage(), strip), tile.block < 0 ? view_of_the_end() : view);
      }
      if (tile.block < 0) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, kConsumers * kQPanels * kStripPanelBytes);
#pragma unroll
        for (int strip = 0; strip < kConsumers; ++strip) {
          const Strip at = strip_of(strip);
#pragma unroll
          for (int panel = 0; panel < kQPanels; ++panel)
            tma_load(buffer + strip * kLayout.strip_bytes + panel * kStripPanelBytes, &p.q_map, full,
                     {ElementQ::kPanelColumns * panel, n.q_start + at.row, at.head, kPacked ? 0 : tile.batch},
                     Keep::kShort);
        }
      }
      if constexpr (kHasCodes) {
        store_shared_struct(head_address(smem, q.ring.stage()), head);
        mbarrier_arrive(full);
      }
    }
    q.advance();
  }

  // A tile of K or V: a box for each panel. From pages a lane loads the boxes of its rows, which lie in one page.
  // `other_bytes`: what else the barrier waits for.
  template <class Type, int panels>
  __device__ __forceinline__ void load_tile(u32 buffer, const void* map, u32 barrier, const Keys& keys, int key_tile,
                                            int other_bytes = 0) {
    if (elect_one()) {
      mbarrier_arrive_expect(barrier, panels * kPanelBytes + other_bytes);
      if (kPage == 0)
        load_boxes<Type, panels>(buffer, map, barrier,
                                 {0, keys.first + key_tile * kBlockKeys, keys.head, keys.batch});
    }
    const int box = threadIdx.x % 32;
    if (kPage > 0 && box < kBlockKeys / kBoxKeys) {
      const int key = key_tile * kBlockKeys + box * kBoxKeys;
      const PageRow at = page_row(p.pages, keys.batch, keys.first, keys.count, key);
      load_boxes<Type, panels>(buffer + box * kBoxKeys * kPanelRowBytes, map, barrier, {0, at.row, keys.head, at.page});
    }
  }

  template <class Type, int panels>
  __device__ __forceinline__ void load_boxes(u32 buffer, const void* map, u32 barrier, const BoxStart& at) {
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
      tma_load(buffer + panel * kPanelBytes, map, barrier, {Type::kPanelColumns * panel, at.row, at.head, at.batch},
               Keep::kLong);
  }

  // K of a tile. The bias of its keys comes with it, for each strip, or the words of a mask of bits if it is `masked`.
  template <class StripOf>
  __device__ __forceinline__ void load_k(const Keys& keys, int key_tile, StripOf strip_of, bool masked = false) {
    k.wait_empty();
    load_tile<ElementK, kKPanels>(k.address(), &p.k_map, k.full(), keys, key_tile,
                                  kBiasTiles * (kMaskBits ? masked * kMaskTileBytes : kBiasPanels * kBiasBoxBytes));
    if constexpr (kMaskBits) {
      if (masked && elect_one()) {
#pragma unroll
        for (int strip = 0; strip < kBiasTiles; ++strip)
          bulk_load(k.address() + kLayout.bias + strip * kLayout.strip_bias_bytes,
                    mask_words_of_strip(p, keys, strip_of(strip).row) + key_tile * kMaskWords * kMaskThreads,
                    kMaskTileBytes, k.full(), Keep::kShort);
      }
    }
    if (kBiasTile && elect_one()) {
#pragma unroll
      for (int strip = 0; strip < kBiasTiles; ++strip)
#pragma unroll
        for (int panel = 0; panel < kBiasPanels; ++panel)
          tma_load(k.address() + kLayout.bias + strip * kLayout.strip_bias_bytes +
                       panel * bias_panel_bytes(kBiasRows, kStripRows),
                   &p.bias_map, k.full(),
                   {key_tile * kBlockKeys + panel * kPanelRowBytes / bias_bytes(kBias),
                    kBiasRows ? strip_of(strip).row : 0, keys.bias_head, keys.bias_batch},
                   Keep::kShort);
    }
    k.advance();
  }

  // With kPairs K of a tile and V of the tile to its right, whose products are issued together, have one pair of
  // barriers, at which both arrive: the consumers wait and release half as often. The first pair of a q tile has no V.
  // The last one has no K, and in its place the means of V, if they are added by products.
  __device__ __forceinline__ void load_k_of_last_pair(const Keys& keys, const KeyTiles& tiles) {
    k.wait_empty();
    if constexpr (kMeanSteps > 0) {
      wait_for_earlier_kernels();
      const int first = tiles.begin / kSegmentTiles, last = (tiles.end - 1) / kSegmentTiles;
      const int bytes = mean_steps(first, last) * kMeanStepBytes;
      if (elect_one()) {
        mbarrier_arrive_expect(k.full(), bytes);
        bulk_load(k.address(), mean_steps_of(p, keys.means) + first / kSegmentsOfStep * kMeanStepBytes, bytes,
                  k.full(), Keep::kLong);
      }
    } else {
      if (elect_one()) mbarrier_arrive(k.full());
    }
    k.advance();
  }
  __device__ __forceinline__ void skip_v_of_first_pair() {
    if (elect_one()) mbarrier_arrive(v.full());
    v.advance();
  }

  // V of a tile. P is 0 in its rows after the end of the sequence, but 0 * NaN is NaN: they are cleared where TMA does
  // not write zeros there.
  __device__ __forceinline__ void load_v(const Keys& keys, int key_tile) {
    v.wait_empty();
    const u32 full = v.full();
    const u32 buffer = v.address();
    if constexpr (!kMapsTiles) wait_for_earlier_kernels();  // they prepare V; or a map, and have ended
    if constexpr (kCentersV) {
      if (elect_one()) {
        mbarrier_arrive_expect(full, kLayout.v_bytes);
        const unsigned char* const tile = p.values.image + (keys.image + key_tile) * kLayout.v_bytes;
        bulk_load(buffer, tile, kLayout.v_bytes, full, Keep::kLong);
      }
      v.advance();
      return;
    }
    const int valid = keys.count - key_tile * kBlockKeys;
    const bool clear = (kPackedK || kSeqUsedK || kPage > 0) && valid < kBlockKeys;
    const u32 landed = clear ? smem + kLayout.v_tail : full;
    load_tile<ElementV, kVPanels>(buffer, &p.v_map, landed, keys, key_tile);
    if (clear) {
      const u32 lane = threadIdx.x % 32;
      mbarrier_wait(landed, tail_parity);
      tail_parity ^= 1;
      for (int panel = 0; panel < kVPanels; ++panel)
        for (int at = valid * kPanelRowBytes + 16 * lane; at < kPanelBytes; at += 512)
          store_shared_zero16(buffer + panel * kPanelBytes + at);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(full);
    }
    v.advance();
  }
};
