// The attention half of a layer: queries, keys and values, their norms and rotation, the cache, and the sum over what is seen.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "decoder.h"

namespace spile {
namespace {

// Queries and keys up to it have scores that float32 holds: a head's 2^20 dimensions at most times its square. A score of minus
// infinity would count as a position that is not seen.
constexpr float kLargestScored = 1e16f;

}  // namespace

void Decoder::rotate(float* head, int t) const {
  const int half = config_.rope_dims / 2;
  const float* row = rope_.data() + static_cast<size_t>(t) * static_cast<size_t>(config_.rope_dims);
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * row[i] - b * row[half + i];
    head[half + i] = b * row[i] + a * row[half + i];
  }
}

int64_t Decoder::first_seen(int layer, int64_t position) const {
  return config_.sliding[static_cast<size_t>(layer)] ? std::max<int64_t>(0, position - config_.window + 1) : 0;
}

Seen Decoder::seen_of(int layer, int64_t block, int64_t position) const {
  const int64_t start = block * kBlockPositions;
  return {static_cast<int>(std::max<int64_t>(0, first_seen(layer, position) - start)),
          static_cast<int>(std::min<int64_t>(kBlockPositions, position + 1 - start))};
}

// The queries of `num` tokens for one KV head as the kernels take them: rows by token, then head.
Queries Decoder::pack_queries(const KvLayout& layout, int kv_head, int first_token, int num, float* to) const {
  const size_t stride = static_cast<size_t>(num * heads_per_kv_), head_dim = static_cast<size_t>(config_.head_dim);
  float* sums = to + head_dim * stride;
  for (size_t r = 0; r < stride; ++r) {
    const size_t token = static_cast<size_t>(first_token) + r / static_cast<size_t>(heads_per_kv_);
    const size_t head = static_cast<size_t>(kv_head * heads_per_kv_) + r % static_cast<size_t>(heads_per_kv_);
    const float* from = q_.data() + token * static_cast<size_t>(q_size_) + head * head_dim;
    for (size_t d = 0; d < head_dim; ++d) to[d * stride + r] = from[d];
  }
  if (layout.bits.keys < 16) {
    const size_t group = static_cast<size_t>(layout.group());
    for (size_t g = 0; g < head_dim / group; ++g)
      for (size_t r = 0; r < stride; ++r) {
        float sum = 0.0f;
        for (size_t d = g * group; d < (g + 1) * group; ++d) sum = sum + to[d * stride + r];
        sums[g * stride + r] = sum;
      }
  }
  return {to, sums, static_cast<int>(stride)};
}

// One token: its blocks are spread over the threads, some at a time, and their partial results merged in ascending order.
void Decoder::attend_one(const KvCache& cache, int layer) {
  constexpr int64_t kBlocksAtOnce = 64;
  const int64_t position = cache.position, end_block = position / kBlockPositions + 1;
  const KvLayout& layout = cache.shape().layout(layer);
  const size_t result = static_cast<size_t>(2 + value_stride_), rows = static_cast<size_t>(heads_per_kv_);
  const size_t all_rows = static_cast<size_t>(config_.num_heads), group = rows * result;
  const size_t wanted = all_rows * (packed_ + result * (1 + static_cast<size_t>(kBlocksAtOnce)));
  if (partials_.size() < wanted) partials_.resize(wanted);
  float* running = partials_.data() + all_rows * packed_;
  float* partials = running + all_rows * result;
  std::vector<Queries> queries;
  for (int kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head)
    queries.push_back(pack_queries(layout, kv_head, 0, 1, partials_.data() + static_cast<size_t>(kv_head) * rows * packed_));
  for (size_t r = 0; r < all_rows; ++r) running[r * result + 1] = 0.0f;
  for (int64_t first = first_seen(layer, position) / kBlockPositions; first < end_block; first += kBlocksAtOnce) {
    const int num = static_cast<int>(std::min(kBlocksAtOnce, end_block - first));
    pool_.run(num * config_.num_kv_heads, [&](int item, int) {
      const int kv_head = item / num;
      const int64_t block = first + item % num;
      const std::vector<Seen> seen(rows, seen_of(layer, block, position));
      kernels_->attend(layout, cache.head(layer, block, kv_head), queries[static_cast<size_t>(kv_head)], 0, heads_per_kv_,
                       seen.data(), partials + static_cast<size_t>(item) * group);
    });
    const auto merge_row = [&](int r, int) {
      float* to = running + static_cast<size_t>(r) * result;
      const size_t kv_head = static_cast<size_t>(r) / rows, within = static_cast<size_t>(r) % rows;
      const float* from = partials + kv_head * static_cast<size_t>(num) * group + within * result;
      for (int block = 0; block < num; ++block) kernels_->merge(to, from + static_cast<size_t>(block) * group, value_stride_);
      if (first + num == end_block)
        kernels_->attend_end(to, config_.head_dim, attended_.data() + static_cast<size_t>(r * config_.head_dim));
    };
    if (num > 16) {
      pool_.run(config_.num_heads, merge_row);
    } else {
      for (int r = 0; r < config_.num_heads; ++r) merge_row(r, 0);
    }
  }
}

// Some neighbouring tokens of a chunk: block by block, each token for itself in the same order as alone.
void Decoder::attend_tokens(const KvCache& cache, int layer, int kv_head, int first_token, int num, float* scratch) {
  const KvLayout& layout = cache.shape().layout(layer);
  const size_t result = static_cast<size_t>(2 + value_stride_);
  const int rows = num * heads_per_kv_;
  const Queries queries = pack_queries(layout, kv_head, first_token, num, scratch);
  float* running = scratch + static_cast<size_t>(rows) * packed_;
  float* partial = running + static_cast<size_t>(rows) * result;
  std::vector<Seen> seen(static_cast<size_t>(rows));
  for (size_t r = 0; r < seen.size(); ++r) running[r * result + 1] = 0.0f;
  const int64_t position = cache.position + first_token, end_block = (position + num - 1) / kBlockPositions + 1;
  for (int64_t block = first_seen(layer, position) / kBlockPositions; block < end_block; ++block) {
    int row = rows, end = 0;  // of the tokens that see anything of the block
    for (int r = 0; r < rows; ++r) {
      const Seen s = seen[static_cast<size_t>(r)] = seen_of(layer, block, position + r / heads_per_kv_);
      if (s.first >= s.last) continue;
      row = std::min(row, r);
      end = r + 1;
    }
    kernels_->attend(layout, cache.head(layer, block, kv_head), queries, row, end - row, seen.data() + row, partial);
    for (int r = row; r < end; ++r)
      kernels_->merge(running + static_cast<size_t>(r) * result, partial + static_cast<size_t>(r - row) * result, value_stride_);
  }
  for (int r = 0; r < rows; ++r) {
    const int token = first_token + r / heads_per_kv_, head = kv_head * heads_per_kv_ + r % heads_per_kv_;
    kernels_->attend_end(running + static_cast<size_t>(r) * result, config_.head_dim,
                         attended_.data() + static_cast<size_t>(token * q_size_ + head * config_.head_dim));
  }
}

void Decoder::attend_many(const KvCache& cache, int layer) {
  const int share = T_ * config_.num_kv_heads / (4 * pool_.size());  // leaves every thread a few items
  const int num = std::max(1, std::min(most_tokens_, share)), tiles = ceil_div(T_, num);
  pool_.run(tiles * config_.num_kv_heads, [&](int item, int thread) {
    const int first = item % tiles * num;
    attend_tokens(cache, layer, item / tiles, first, std::min(num, T_ - first), attend_scratch_[static_cast<size_t>(thread)].data());
  });
}

void Decoder::attend(KvCache& cache, int layer) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size);
  const bool rotates = c.rotates[static_cast<size_t>(layer)];
  cache.reserve(layer, cache.position + T_);
  normalise_and_fix(w.input_norm, Stage::kAttention, layer);

  std::vector<const Fixed*> x(static_cast<size_t>(T_));
  std::vector<float*> q(x.size()), k(x.size()), v(x.size());
  for (size_t t = 0; t < x.size(); ++t) {
    x[t] = &fixed_[t];
    q[t] = q_.data() + t * static_cast<size_t>(q_size_);
    k[t] = k_.data() + t * static_cast<size_t>(kv_size_);
    v[t] = v_.data() + t * static_cast<size_t>(kv_size_);
  }
  const int q_items = ceil_div(q_size_, kRowsPerItem), kv_items = ceil_div(kv_size_, kRowsPerItem);
  pool_.run(q_items + 2 * kv_items, [&](int item, int) {
    const Linear* linear = &w.q;
    float* const* y = q.data();
    int rows = q_size_;
    if (item >= q_items) {
      item -= q_items;
      linear = item < kv_items ? &w.k : &w.v;
      y = item < kv_items ? k.data() : v.data();
      rows = kv_size_;
      item %= kv_items;
    }
    const size_t first = static_cast<size_t>(item * kRowsPerItem), end = std::min(static_cast<size_t>(rows), first + kRowsPerItem);
    kernels_->ternary({linear->codes, linear->alpha, D}, first, end, x.data(), T_, y);
    check_rows(y, T_, first, end, Stage::kAttention, layer);
  });

  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  const size_t head_dim = static_cast<size_t>(c.head_dim);
  const KvLayout& layout = cache.shape().layout(layer);
  // Both sides of a score are rotated, and the factors' product is 1 / rotation: powers of two, which round nothing.
  const int rotation = layout.rotation();
  float q_factor = 1.0f, k_factor = 1.0f;
  for (int size = rotation; size > 1; size /= 2) (q_factor < k_factor ? k_factor : q_factor) *= 0.5f;
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t);
    for (int h = 0; h < c.num_heads; ++h) {
      float* head = q[at] + static_cast<size_t>(h) * head_dim;
      check(kernels_->rmsnorm(head, w.q_norm, head_dim, c.rms_norm_eps, head), Stage::kAttention, layer);
      if (rotates) rotate(head, t);
      for (size_t i = 0; i < head_dim; ++i) head[i] = head[i] * scale;
      if (rotation > 1) kernels_->rotate_head(head, c.head_dim, rotation, q_factor);
      check(kernels_->largest(head, head_dim) <= kLargestScored, Stage::kAttention, layer);
    }
    const int64_t position = cache.position + t;
    const int place = static_cast<int>(position % kBlockPositions);
    for (int h = 0; h < c.num_kv_heads; ++h) {
      float* key = k[at] + static_cast<size_t>(h) * head_dim;
      check(kernels_->rmsnorm(key, w.k_norm, head_dim, c.rms_norm_eps, key), Stage::kAttention, layer);
      if (rotates) rotate(key, t);
      if (rotation > 1) kernels_->rotate_head(key, c.head_dim, rotation, k_factor);
      check(kernels_->largest(key, head_dim) <= kLargestScored, Stage::kAttention, layer);
      uint8_t* block = cache.head(layer, position / kBlockPositions, h);
      kernels_->store_key(layout, key, place, block);
      kernels_->store_value(layout, v[at] + static_cast<size_t>(h) * head_dim, place, block);
    }
  });

  if (T_ == 1) {
    attend_one(cache, layer);
  } else {
    attend_many(cache, layer);
  }

  const size_t wide = static_cast<size_t>(q_size_);
  std::vector<float*> y(x.size());
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t);
    attended_fixed_[at] = kernels_->fix(attended_.data() + at * wide, wide, c.activation_bytes, Layout::kTernary,
                                        attended_planes_.data() + at * 3 * plane_nbytes(wide), nullptr);
    check(attended_fixed_[at].is_finite(), Stage::kAttention, layer);
  });
  for (size_t t = 0; t < x.size(); ++t) {
    x[t] = &attended_fixed_[t];
    y[t] = x_.data() + t * D;
  }
  pool_.run(ceil_div(c.hidden_size, kRowsPerItem), [&](int item, int) {
    const size_t row = static_cast<size_t>(item * kRowsPerItem), end = std::min(D, row + kRowsPerItem);
    kernels_->ternary({w.o.codes, w.o.alpha, wide}, row, end, x.data(), T_, y.data());
    check_rows(y.data(), T_, row, end, Stage::kAttention, layer);
    for (int t = 0; t < T_; ++t) {
      float* h = h_.data() + static_cast<size_t>(t) * D;
      for (size_t i = row; i < end; ++i) h[i] = h[i] + y[static_cast<size_t>(t)][i];
    }
  });
}

}  // namespace spile
