#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "rope.h"

namespace spile {
namespace {

constexpr int kRowsPerItem = 128;  // 64 kB of codes at 2,048 wide: the first few kB of an item are not fetched ahead
constexpr int kHeadRowsPerItem = 256;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

Decoder::Decoder(const DecoderConfig& config, const Kernels* kernels, int num_threads)
    : layers(static_cast<size_t>(config.num_layers)), config_(config), kernels_(kernels), pool_(num_threads) {
  const auto& c = config_;
  const size_t T = static_cast<size_t>(c.max_chunk), D = static_cast<size_t>(c.hidden_size);
  heads_per_kv_ = c.num_heads / c.num_kv_heads;
  q_size_ = c.num_heads * c.head_dim;
  kv_size_ = c.num_kv_heads * c.head_dim;
  value_stride_ = (c.head_dim + 15) / 16 * 16;
  max_pairs_ = std::max(c.max_chunk, 4 * c.num_chosen);
  const size_t pairs = static_cast<size_t>(max_pairs_), wide = static_cast<size_t>(std::max(c.expert_size, 16));
  h_.resize(T * D);
  x_.resize(T * D);
  q_.resize(T * static_cast<size_t>(q_size_));
  k_.resize(T * static_cast<size_t>(kv_size_));
  v_.resize(T * static_cast<size_t>(kv_size_));
  attended_.resize(T * static_cast<size_t>(q_size_));
  probabilities_.resize(T * static_cast<size_t>(c.num_experts));
  outputs_.resize(static_cast<size_t>(max_pairs_) * D);
  gate_.resize(pairs * wide);
  up_.resize(pairs * wide);
  rope_.resize(T * static_cast<size_t>(c.rope_dims));
  planes_.resize(T * 3 * plane_nbytes(D));
  attended_planes_.resize(T * 3 * plane_nbytes(static_cast<size_t>(q_size_)));
  pair_planes_.resize(pairs * 3 * plane_nbytes(wide));
  groups_.resize(T * num_group_sums(D));
  fixed_.resize(T);
  attended_fixed_.resize(T);
  pair_fixed_.resize(pairs);
  thread_partials_.resize(static_cast<size_t>(pool_.size()));
  for (auto& partial : thread_partials_) partial.resize(static_cast<size_t>(2 * heads_per_kv_ * (2 + value_stride_)));
  chosen_.resize(T * static_cast<size_t>(c.num_chosen));
  weights_.resize(T * static_cast<size_t>(c.num_chosen));
  pairs_.resize(T * static_cast<size_t>(c.num_chosen));
  first_pair_.resize(static_cast<size_t>(c.num_experts) + 1);
}

CacheShape Decoder::cache_shape() const {
  return {config_.num_kv_heads, config_.head_dim, config_.half_cache, config_.window, config_.max_chunk, config_.sliding};
}

size_t Decoder::scratch_nbytes() const {
  size_t n = 0;
  for (const auto* v : {&h_, &x_, &q_, &k_, &v_, &attended_, &probabilities_, &outputs_, &gate_, &up_, &rope_})
    n += v->size() * sizeof(float);
  for (const auto* v : {&planes_, &attended_planes_, &pair_planes_, &dense_planes_}) n += v->size();
  return n;
}

void Decoder::begin(const Affine4& table, const int64_t* rows, int T) {
  T_ = T;
  pool_.run(T, [&](int t, int) {
    kernels_->affine4_row(table, static_cast<size_t>(rows[t]),
                          h_.data() + static_cast<size_t>(t) * static_cast<size_t>(config_.hidden_size));
  });
}

void Decoder::fix_token(int t) {
  const size_t D = static_cast<size_t>(config_.hidden_size), i = static_cast<size_t>(t);
  fixed_[i] = kernels_->fix(x_.data() + i * D, D, config_.activation_bytes, Layout::kTernary,
                            planes_.data() + i * 3 * plane_nbytes(D), nullptr);
}

void Decoder::normalise_and_fix(const uint16_t* weight) {
  const size_t D = static_cast<size_t>(config_.hidden_size);
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t) * D;
    kernels_->rmsnorm(h_.data() + at, weight, D, config_.rms_norm_eps, x_.data() + at);
    fix_token(t);
  });
}

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

void Decoder::dense(int layer) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size), wide = static_cast<size_t>(c.dense_size), T = static_cast<size_t>(T_);
  const size_t stride = 3 * plane_nbytes(wide);
  if (gate_.size() < T * wide) gate_.resize(T * wide);
  if (up_.size() < T * wide) up_.resize(T * wide);
  if (dense_planes_.size() < T * stride) dense_planes_.resize(T * stride);
  normalise_and_fix(w.post_norm);
  std::vector<const Fixed*> x(T);
  std::vector<float*> gate(T), up(T), y(T);
  for (size_t t = 0; t < T; ++t) {
    x[t] = &fixed_[t];
    gate[t] = gate_.data() + t * wide;
    up[t] = up_.data() + t * wide;
    y[t] = x_.data() + t * D;
  }
  const int items = ceil_div(c.dense_size, kRowsPerItem);
  pool_.run(2 * items, [&](int item, int) {
    const bool is_gate = item < items;
    const Linear& linear = is_gate ? w.gate : w.up;
    const size_t row = static_cast<size_t>((is_gate ? item : item - items) * kRowsPerItem);
    kernels_->ternary({linear.codes, linear.alpha, D}, row, std::min(wide, row + kRowsPerItem), x.data(), T_,
                      is_gate ? gate.data() : up.data());
  });
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t);
    kernels_->swiglu(gate[at], up[at], wide, false, gate[at]);
    attended_fixed_[at] = kernels_->fix(gate[at], wide, c.activation_bytes, Layout::kTernary,
                                        dense_planes_.data() + at * stride, nullptr);
  });
  for (size_t t = 0; t < T; ++t) x[t] = &attended_fixed_[t];
  pool_.run(ceil_div(c.hidden_size, kRowsPerItem), [&](int item, int) {
    const size_t row = static_cast<size_t>(item * kRowsPerItem), end = std::min(D, row + kRowsPerItem);
    kernels_->ternary({w.down.codes, w.down.alpha, wide}, row, end, x.data(), T_, y.data());
    for (size_t t = 0; t < T; ++t)
      for (size_t i = row; i < end; ++i) h_[t * D + i] = h_[t * D + i] + y[t][i];
  });
}

const std::vector<int32_t>& Decoder::route(int layer) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size), E = static_cast<size_t>(c.num_experts);
  const size_t K = static_cast<size_t>(c.num_chosen), T = static_cast<size_t>(T_);
  normalise_and_fix(w.post_norm);
  std::vector<const float*> x(T);
  std::vector<float*> y(T);
  for (size_t t = 0; t < T; ++t) {
    x[t] = x_.data() + t * D;
    y[t] = probabilities_.data() + t * E;
  }
  const int row_items = ceil_div(c.num_experts, 32), token_items = ceil_div(T_, 8);
  pool_.run(row_items * token_items, [&](int item, int) {
    const size_t row = static_cast<size_t>(item % row_items) * 32;
    const int t = item / row_items * 8;
    kernels_->router(w.router, D, row, std::min(E, row + 32), x.data() + t, std::min(8, T_ - t), y.data() + t);
  });
  pool_.run(T_, [&](int token, int) {
    const size_t t = static_cast<size_t>(token);
    kernels_->softmax(y[t], E);
    int32_t* chosen = chosen_.data() + t * K;
    float* weight = weights_.data() + t * K;
    float total = 0.0f;
    for (size_t i = 0; i < K; ++i) {  // the largest first, ties to the lower id
      size_t best = E;
      for (size_t e = 0; e < E; ++e)
        if (y[t][e] >= 0.0f && (best == E || y[t][e] > y[t][best])) best = e;
      if (best == E) best = i;  // not a number: any expert will do, the result is not a number either
      chosen[i] = static_cast<int32_t>(best);
      weight[i] = y[t][best];
      y[t][best] = -1.0f;
      total = total + weight[i];
    }
    total = total + 1e-20f;
    for (size_t i = 0; i < K; ++i) weight[i] = weight[i] / total;
    for (size_t i = 1; i < K; ++i)  // ascending id
      for (size_t j = i; j > 0 && chosen[j] < chosen[j - 1]; --j) {
        std::swap(chosen[j], chosen[j - 1]);
        std::swap(weight[j], weight[j - 1]);
      }
  });
  std::fill(first_pair_.begin(), first_pair_.end(), 0);
  for (size_t i = 0; i < T * K; ++i) ++first_pair_[static_cast<size_t>(chosen_[i]) + 1];
  ids_.clear();
  counts_.clear();
  for (size_t e = 0; e < E; ++e) {
    if (first_pair_[e + 1]) {
      ids_.push_back(static_cast<int32_t>(e));
      counts_.push_back(first_pair_[e + 1]);
    }
    first_pair_[e + 1] += first_pair_[e];
  }
  std::vector<int32_t> next(first_pair_.begin(), first_pair_.end() - 1);
  for (size_t t = 0; t < T; ++t)
    for (size_t i = 0; i < K; ++i)
      pairs_[static_cast<size_t>(next[static_cast<size_t>(chosen_[t * K + i])]++)] = {static_cast<int>(t), static_cast<int>(i)};
  last_expert_ = -1;
  if (T_ > 1) std::fill(x_.begin(), x_.begin() + static_cast<std::ptrdiff_t>(T * D), 0.0f);  // from here on the weighted sums
  return ids_;
}

void Decoder::experts(int layer, const int32_t* ids, const uint64_t* codes, int num) {
  std::vector<Task> batch;
  int pairs = 0;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  for (int i = 0; i < num; ++i) {
    const size_t e = static_cast<size_t>(ids[i]);
    if (T_ > 1 && ids[i] <= last_expert_) throw std::invalid_argument("a chunk's experts must come in ascending order");
    last_expert_ = ids[i];
    const int count = first_pair_[e + 1] - first_pair_[e];
    if (pairs + count > max_pairs_) {
      expert_batch(w, batch.data(), static_cast<int>(batch.size()));
      batch.clear();
      pairs = 0;
    }
    Task task = {ids[i], {}, first_pair_[e], count};
    for (int p = 0; p < 3; ++p) task.codes[p] = reinterpret_cast<const uint8_t*>(codes[3 * i + p]);
    batch.push_back(task);
    pairs += count;
  }
  if (!batch.empty()) expert_batch(w, batch.data(), static_cast<int>(batch.size()));
}

void Decoder::expert_batch(const LayerWeights& w, const Task* tasks, int num) {
  const auto& c = config_;
  const size_t D = static_cast<size_t>(c.hidden_size), F = static_cast<size_t>(c.expert_size);
  const size_t stride = 3 * plane_nbytes(F);
  std::vector<const Fixed*> x, hidden;
  std::vector<float*> gate, up, y;
  std::vector<int> start(static_cast<size_t>(num));  // of each task in the lists above
  for (int i = 0; i < num; ++i) {
    start[static_cast<size_t>(i)] = static_cast<int>(x.size());
    for (int j = 0; j < tasks[i].count; ++j) {
      const Pair& pair = pairs_[static_cast<size_t>(tasks[i].first + j)];
      const size_t at = x.size();
      x.push_back(&fixed_[static_cast<size_t>(pair.token)]);
      hidden.push_back(&pair_fixed_[at]);
      gate.push_back(gate_.data() + at * F);
      up.push_back(up_.data() + at * F);
      y.push_back(outputs_.data() + (T_ == 1 ? static_cast<size_t>(pair.rank) : at) * D);
    }
  }
  const int f_items = ceil_div(c.expert_size, kRowsPerItem), d_items = ceil_div(c.hidden_size, 2 * kRowsPerItem);
  pool_.run(num * 2 * f_items, [&](int item, int) {
    const Task& task = tasks[item / (2 * f_items)];
    const size_t first = static_cast<size_t>(start[static_cast<size_t>(item / (2 * f_items))]);
    const bool is_gate = item % (2 * f_items) < f_items;
    const size_t row = static_cast<size_t>(item % f_items * kRowsPerItem);
    const uint16_t* alpha = (is_gate ? w.gate_alpha : w.up_alpha) + static_cast<size_t>(task.expert) * F;
    kernels_->ternary({task.codes[is_gate ? 0 : 1], alpha, D}, row, std::min(F, row + kRowsPerItem), x.data() + first,
                      task.count, (is_gate ? gate.data() : up.data()) + first);
  });
  pool_.run(static_cast<int>(x.size()), [&](int i, int) {
    const size_t at = static_cast<size_t>(i);
    kernels_->swiglu(gate[at], up[at], F, true, gate[at]);
    pair_fixed_[at] = kernels_->fix(gate[at], F, c.activation_bytes, Layout::kTernary, pair_planes_.data() + at * stride,
                                    nullptr);
  });
  pool_.run(num * d_items, [&](int item, int) {
    const Task& task = tasks[item / d_items];
    const size_t first = static_cast<size_t>(start[static_cast<size_t>(item / d_items)]);
    const size_t row = static_cast<size_t>(item % d_items * 2 * kRowsPerItem);
    kernels_->ternary({task.codes[2], w.down_alpha + static_cast<size_t>(task.expert) * D, F}, row,
                      std::min(D, row + 2 * kRowsPerItem), hidden.data() + first, task.count, y.data() + first);
  });
  if (T_ > 1) add_outputs(tasks, num);
}

// Adds a batch's weighted outputs to the tokens' sums, in ascending order of experts: the order of the sum is the answer's.
void Decoder::add_outputs(const Task* tasks, int num) {
  constexpr size_t kWidth = 256;
  const size_t D = static_cast<size_t>(config_.hidden_size), K = static_cast<size_t>(config_.num_chosen);
  pool_.run(ceil_div(config_.hidden_size, static_cast<int>(kWidth)), [&](int item, int) {
    const size_t first = static_cast<size_t>(item) * kWidth, width = std::min(kWidth, D - first);
    const float* y = outputs_.data() + first;
    for (int i = 0; i < num; ++i)
      for (int j = 0; j < tasks[i].count; ++j, y += D) {
        const Pair& pair = pairs_[static_cast<size_t>(tasks[i].first + j)];
        const size_t t = static_cast<size_t>(pair.token);
        kernels_->add_scaled(x_.data() + t * D + first, y, weights_[t * K + static_cast<size_t>(pair.rank)], width);
      }
  });
}

void Decoder::combine() {
  const size_t D = static_cast<size_t>(config_.hidden_size), K = static_cast<size_t>(config_.num_chosen);
  if (T_ == 1) {
    std::memset(x_.data(), 0, D * sizeof(float));
    for (size_t i = 0; i < K; ++i) kernels_->add_scaled(x_.data(), outputs_.data() + i * D, weights_[i], D);
  }
  pool_.run(T_, [&](int t, int) {
    const size_t at = static_cast<size_t>(t) * D;
    kernels_->add_scaled(h_.data() + at, x_.data() + at, 1.0f, D);
  });
}

void Decoder::finish(int num) {
  const size_t D = static_cast<size_t>(config_.hidden_size);
  num_finished_ = num;
  pool_.run(num, [&](int i, int) {
    const size_t at = static_cast<size_t>(i), t = static_cast<size_t>(T_ - num + i);
    kernels_->rmsnorm(h_.data() + t * D, final_norm, D, config_.rms_norm_eps, x_.data() + t * D);
    fixed_[at] = kernels_->fix(x_.data() + t * D, D, config_.activation_bytes, Layout::kNibble,
                               planes_.data() + at * 3 * plane_nbytes(D), groups_.data() + at * num_group_sums(D));
  });
}

void Decoder::head(const Affine4& piece, int row, int count, float* out) {
  const size_t V = static_cast<size_t>(config_.vocab_size);
  std::vector<const Fixed*> x(static_cast<size_t>(num_finished_));
  std::vector<float*> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = &fixed_[i];
    y[i] = out + i * V + row;
  }
  pool_.run(ceil_div(count, kHeadRowsPerItem), [&](int item, int) {
    const int first = item * kHeadRowsPerItem;
    kernels_->affine4(piece, static_cast<size_t>(first), static_cast<size_t>(std::min(count, first + kHeadRowsPerItem)),
                      x.data(), num_finished_, y.data());
  });
}

}  // namespace spile
