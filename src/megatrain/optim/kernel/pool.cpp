#include "pool.h"

#include <system_error>

namespace megatrain {

Pool::Pool(int threads) {
    helpers_.reserve(static_cast<size_t>(threads));
    try {
        while (this->threads() < threads) helpers_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {  // a limit on processes or threads
    }
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    started_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Pool::run(const std::function<void()>& work) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        busy_ = helpers_.size();
        ++round_;
    }
    started_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
}

void Pool::serve() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        started_.wait(lock, [&] { return closing_ || round_ != seen; });
        if (closing_) return;
        seen = round_;
        const std::function<void()>& work = *work_;
        lock.unlock();
        work();
        lock.lock();
        if (--busy_ == 0) finished_.notify_one();
    }
}

}  // namespace megatrain
