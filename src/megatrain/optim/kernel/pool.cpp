#include "pool.h"

#include <signal.h>

#include <cstdlib>
#include <new>

namespace megatrain {

Pool* Pool::create(int threads) {
    void* memory = std::malloc(sizeof(Pool));
    if (memory == nullptr) return nullptr;
    Pool* pool = new (memory) Pool();
    pool->start(threads - 1);
    return pool;
}

void Pool::start(int helpers) {
    if (helpers <= 0) return;
    handles_ = static_cast<pthread_t*>(std::calloc(static_cast<size_t>(helpers), sizeof(pthread_t)));
    if (handles_ == nullptr) return;
    // Helpers take no signals: those are for the interpreter's main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (helpers_ < helpers && pthread_create(&handles_[helpers_], nullptr, serve, this) == 0) ++helpers_;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::destroy(Pool* pool) {
    pthread_mutex_lock(&pool->mutex_);
    pool->closing_ = true;
    pthread_cond_broadcast(&pool->started_);
    pthread_mutex_unlock(&pool->mutex_);
    for (int i = 0; i < pool->helpers_; ++i) pthread_join(pool->handles_[i], nullptr);
    std::free(pool->handles_);
    std::free(pool);
}

void Pool::run(Work work, void* context) {
    pthread_mutex_lock(&mutex_);
    work_ = work;
    context_ = context;
    busy_ = helpers_;
    ++round_;
    pthread_cond_broadcast(&started_);
    pthread_mutex_unlock(&mutex_);

    work(context);

    pthread_mutex_lock(&mutex_);
    while (busy_ != 0) pthread_cond_wait(&finished_, &mutex_);
    pthread_mutex_unlock(&mutex_);
}

void* Pool::serve(void* pool) {
    Pool& self = *static_cast<Pool*>(pool);
    uint64_t seen = 0;
    pthread_mutex_lock(&self.mutex_);
    for (;;) {
        while (!self.closing_ && self.round_ == seen) pthread_cond_wait(&self.started_, &self.mutex_);
        if (self.closing_) break;
        seen = self.round_;
        const Work work = self.work_;
        void* const context = self.context_;
        pthread_mutex_unlock(&self.mutex_);
        work(context);
        pthread_mutex_lock(&self.mutex_);
        if (--self.busy_ == 0) pthread_cond_signal(&self.finished_);
    }
    pthread_mutex_unlock(&self.mutex_);
    return nullptr;
}

}  // namespace megatrain
