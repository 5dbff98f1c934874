// The attention half of a layer: queries, keys and values, their norms and rotation, the cache, and the sum over what is seen.
#include <algorithm>
#include <cmath>

#include "decoder.h"
#include "rope.h"

namespace spile {

void Decoder::prepare_rope(int64_t position) {
  const int half = config_.rope_dims / 2;
  const double log_theta = log_double(config_.rope_theta);
  for (int i = 0; i < half; ++i) {
    const double frequency = exp_double(-2.0 * i / config_.rope_dims * log_theta);
    for (int t = 0; t < T_; ++t) {
      double sine, cosine;
      sin_cos(static_cast<double>(position + t) * frequency, &sine, &cosine);
      float* row = rope_.data() + static_cast<size_t>(t) * static_cast<size_t>(config_.rope_dims);
      row[i] = static_cast<float>(cosine);
      row[half + i] = static_cast<float>(sine);
    }
  }
}

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

void Decoder::attend_block(const KvCache& cache, int layer, int kv_head, int64_t block, int64_t position, const float* q,
                           float* out) const {
  const int64_t start = block * kBlockPositions;
  const AttendShape shape = {heads_per_kv_, config_.head_dim, value_stride_,
                             static_cast<int>(std::max<int64_t>(0, first_seen(layer, position) - start)),
                             static_cast<int>(std::min<int64_t>(kBlockPositions, position + 1 - start))};
  const uint8_t* keys = cache.keys(layer, block, kv_head);
  const uint8_t* values = cache.values(layer, block, kv_head);
  if (config_.half_cache) {
    kernels_->attend_half({reinterpret_cast<const uint16_t*>(keys), reinterpret_cast<const uint16_t*>(values)}, shape, q, out);
  } else {
    kernels_->attend_float({reinterpret_cast<const float*>(keys), reinterpret_cast<const float*>(values)}, shape, q, out);
  }
}

// One token: its blocks are spread over the threads, and their partial results merged in ascending order.
void Decoder::attend_one(const KvCache& cache, int layer) {
  const int64_t position = cache.position, first_block = first_seen(layer, position) / kBlockPositions;
  const int num_blocks = static_cast<int>(position / kBlockPositions - first_block + 1);
  const size_t head = static_cast<size_t>(2 + value_stride_), group = head * static_cast<size_t>(heads_per_kv_);
  const size_t wanted = static_cast<size_t>(num_blocks * config_.num_kv_heads) * group;
  if (partials_.size() < wanted) partials_.resize(wanted);
  pool_.run(num_blocks * config_.num_kv_heads, [&](int item, int) {
    const int kv_head = item / num_blocks, block = item % num_blocks;
    attend_block(cache, layer, kv_head, first_block + block, position,
                 q_.data() + static_cast<size_t>(kv_head * heads_per_kv_ * config_.head_dim),
                 partials_.data() + static_cast<size_t>(item) * group);
  });
  const auto merge_head = [&](int h, int) {
    const size_t kv_head = static_cast<size_t>(h / heads_per_kv_), within = static_cast<size_t>(h % heads_per_kv_);
    float* running = partials_.data() + kv_head * static_cast<size_t>(num_blocks) * group + within * head;
    for (int block = 1; block < num_blocks; ++block)
      kernels_->merge(running, running + static_cast<size_t>(block) * group, value_stride_);
    kernels_->finish(running, config_.head_dim, attended_.data() + static_cast<size_t>(h * config_.head_dim));
  };
  if (num_blocks > 16) {
    pool_.run(config_.num_heads, merge_head);
  } else {
    for (int h = 0; h < config_.num_heads; ++h) merge_head(h, 0);
  }
}

// A chunk: a thread takes one token and KV head at a time and walks its blocks, merging in the same order.
void Decoder::attend_many(const KvCache& cache, int layer) {
  const size_t head = static_cast<size_t>(2 + value_stride_), group = head * static_cast<size_t>(heads_per_kv_);
  pool_.run(T_ * config_.num_kv_heads, [&](int item, int thread) {
    const int kv_head = item / T_, t = item % T_;
    const int64_t position = cache.position + t, last = position / kBlockPositions;
    const size_t first_head = static_cast<size_t>(t * q_size_ + kv_head * heads_per_kv_ * config_.head_dim);
    float* running = thread_partials_[static_cast<size_t>(thread)].data();
    float* partial = running + group;
    int64_t block = first_seen(layer, position) / kBlockPositions;
    attend_block(cache, layer, kv_head, block, position, q_.data() + first_head, running);
    for (++block; block <= last; ++block) {
      attend_block(cache, layer, kv_head, block, position, q_.data() + first_head, partial);
      for (int h = 0; h < heads_per_kv_; ++h)
        kernels_->merge(running + static_cast<size_t>(h) * head, partial + static_cast<size_t>(h) * head, value_stride_);
    }
    for (int h = 0; h < heads_per_kv_; ++h)
      kernels_->finish(running + static_cast<size_t>(h) * head, config_.head_dim,
                       attended_.data() + first_head + static_cast<size_t>(h * config_.head_dim));
  });
}

void Decoder::attend(KvCache& cache, int layer) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size);
  const bool sliding = c.sliding[static_cast<size_t>(layer)];
  cache.reserve(layer, cache.position + T_);
  if (layer == 0) prepare_rope(cache.position);
  normalise_and_fix(w.input_norm);

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
    const int row = item * kRowsPerItem;
    kernels_->ternary({linear->codes, linear->alpha, D}, static_cast<size_t>(row),
                      static_cast<size_t>(std::min(rows, row + kRowsPerItem)), x.data(), T_, y);
  });

  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  const size_t head_dim = static_cast<size_t>(c.head_dim);
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t);
    for (int h = 0; h < c.num_heads; ++h) {
      float* head = q[at] + static_cast<size_t>(h) * head_dim;
      kernels_->rmsnorm(head, w.q_norm, head_dim, c.rms_norm_eps, head);
      if (sliding) rotate(head, t);
      for (size_t i = 0; i < head_dim; ++i) head[i] = head[i] * scale;
    }
    const int64_t position = cache.position + t;
    const int slot = static_cast<int>(position % kBlockPositions);
    for (int h = 0; h < c.num_kv_heads; ++h) {
      float* key = k[at] + static_cast<size_t>(h) * head_dim;
      const float* value = v[at] + static_cast<size_t>(h) * head_dim;
      kernels_->rmsnorm(key, w.k_norm, head_dim, c.rms_norm_eps, key);
      if (sliding) rotate(key, t);
      uint8_t* keys = cache.keys(layer, position / kBlockPositions, h);
      uint8_t* values = cache.values(layer, position / kBlockPositions, h);
      if (c.half_cache) {
        kernels_->store_half(key, value, c.head_dim, value_stride_, slot, reinterpret_cast<uint16_t*>(keys),
                             reinterpret_cast<uint16_t*>(values));
      } else {
        kernels_->store_float(key, value, c.head_dim, value_stride_, slot, reinterpret_cast<float*>(keys),
                              reinterpret_cast<float*>(values));
      }
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
  });
  for (size_t t = 0; t < x.size(); ++t) {
    x[t] = &attended_fixed_[t];
    y[t] = x_.data() + t * D;
  }
  pool_.run(ceil_div(c.hidden_size, kRowsPerItem), [&](int item, int) {
    const size_t row = static_cast<size_t>(item * kRowsPerItem), end = std::min(D, row + kRowsPerItem);
    kernels_->ternary({w.o.codes, w.o.alpha, wide}, row, end, x.data(), T_, y.data());
    for (int t = 0; t < T_; ++t) {
      float* h = h_.data() + static_cast<size_t>(t) * D;
      for (size_t i = row; i < end; ++i) h[i] = h[i] + y[static_cast<size_t>(t)][i];
    }
  });
}

}  // namespace spile
