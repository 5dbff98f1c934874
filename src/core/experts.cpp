// The expert half of a layer: routing, the chosen experts over their tokens, and the weighted sum in its one order.
#include <algorithm>
#include <cfloat>
#include <cstring>
#include <stdexcept>

#include "decoder.h"

namespace spile {

const std::vector<int32_t>& Decoder::route(int layer, const uint8_t* allowed) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size), E = static_cast<size_t>(c.num_experts);
  const size_t K = static_cast<size_t>(c.num_chosen), T = static_cast<size_t>(T_);
  normalise_and_fix(w.post_norm, Stage::kRouter, layer);
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
    check(kernels_->largest(y[t], E) <= FLT_MAX, Stage::kRouter, layer);  // minus infinity would never be chosen
    kernels_->softmax(y[t], E);
    if (allowed)
      for (size_t e = 0; e < E; ++e)
        if (!allowed[e]) y[t][e] = -1.0f;
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
    total = total + c.router_eps;
    if (c.renormalise)
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

void Decoder::foretell(int layer, int32_t* ids) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
  const size_t D = static_cast<size_t>(c.hidden_size), E = static_cast<size_t>(c.num_experts);
  if (foretold_.size() < D + E) foretold_.resize(D + E);
  const float* x = foretold_.data();
  float* y = foretold_.data() + D;
  kernels_->rmsnorm(h_.data(), w.post_norm, D, c.rms_norm_eps, foretold_.data());
  pool_.run(ceil_div(c.num_experts, 32), [&](int item, int) {
    const size_t row = static_cast<size_t>(item) * 32;
    kernels_->router(w.router, D, row, std::min(E, row + 32), &x, 1, &y);
  });
  std::vector<uint8_t> taken(E, 0);
  for (int i = 0; i < c.num_chosen; ++i) {  // different ones, also where no value is a number
    size_t best = E;
    for (size_t e = 0; e < E; ++e)
      if (!taken[e] && (best == E || y[e] > y[best])) best = e;
    taken[best] = 1;
    ids[i] = static_cast<int32_t>(best);
  }
}

void Decoder::experts(int layer, const int32_t* ids, const uint64_t* codes, int num) {
  std::vector<Task> batch;
  int pairs = 0;
  for (int i = 0; i < num; ++i) {
    const size_t e = static_cast<size_t>(ids[i]);
    if (T_ > 1 && ids[i] <= last_expert_) throw std::invalid_argument("a chunk's experts must come in ascending order");
    last_expert_ = ids[i];
    const int count = first_pair_[e + 1] - first_pair_[e];
    if (pairs + count > max_pairs_) {
      expert_batch(layer, batch.data(), static_cast<int>(batch.size()));
      batch.clear();
      pairs = 0;
    }
    Task task = {ids[i], {}, first_pair_[e], count};
    for (int p = 0; p < 3; ++p) task.codes[p] = reinterpret_cast<const uint8_t*>(codes[3 * i + p]);
    batch.push_back(task);
    pairs += count;
  }
  if (!batch.empty()) expert_batch(layer, batch.data(), static_cast<int>(batch.size()));
}

void Decoder::expert_batch(int layer, const Task* tasks, int num) {
  const auto& c = config_;
  const LayerWeights& w = layers[static_cast<size_t>(layer)];
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
    float* const* to = (is_gate ? gate.data() : up.data()) + first;
    const size_t end = std::min(F, row + kRowsPerItem);
    kernels_->ternary({task.codes[is_gate ? 0 : 1], alpha, D}, row, end, x.data() + first, task.count, to);
    check_rows(to, task.count, row, end, Stage::kExperts, layer, task.expert);  // before the clamps
  });
  pool_.run(static_cast<int>(x.size()), [&](int i, int) {
    const size_t at = static_cast<size_t>(i);
    kernels_->swiglu(gate[at], up[at], F, c.expert_limit, gate[at]);
    pair_fixed_[at] = kernels_->fix(gate[at], F, c.activation_bytes, Layout::kTernary, pair_planes_.data() + at * stride,
                                    nullptr);
  });
  pool_.run(num * d_items, [&](int item, int) {
    const Task& task = tasks[item / d_items];
    const size_t first = static_cast<size_t>(start[static_cast<size_t>(item / d_items)]);
    const size_t row = static_cast<size_t>(item % d_items * 2 * kRowsPerItem), end = std::min(D, row + 2 * kRowsPerItem);
    kernels_->ternary({task.codes[2], w.down_alpha + static_cast<size_t>(task.expert) * D, F}, row, end,
                      hidden.data() + first, task.count, y.data() + first);
    check_rows(y.data() + first, task.count, row, end, Stage::kExperts, layer, task.expert);
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

}  // namespace spile
