// Threads of our own, so that neither OMP_NUM_THREADS nor the interpreter decides how many update.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace megatrain {

// Calls a function on `threads` threads, the caller's among them. One `run` at a time.
class Pool {
   public:
    explicit Pool(int threads);  // or as many as the system grants: fewer are slower, not wrong
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(helpers_.size()) + 1; }

    // Returns when `work` has returned on every thread.
    void run(const std::function<void()>& work);

   private:
    void serve();

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable started_, finished_;
    const std::function<void()>* work_ = nullptr;
    uint64_t round_ = 0;  // counts calls of run: a helper works once per round
    size_t busy_ = 0;     // helpers that have not finished this round
    bool closing_ = false;
};

}  // namespace megatrain
