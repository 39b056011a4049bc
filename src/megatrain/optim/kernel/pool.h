// Threads of our own, so that neither OMP_NUM_THREADS nor the interpreter decides how many update.
//
// Written on pthreads, without exceptions or any other part of the C++ runtime library: the built file then needs
// nothing but glibc, and runs on a machine other than the one that built it.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace megatrain {

// Calls a function on several threads, the caller's among them. One `run` at a time.
class Pool {
   public:
    using Work = void (*)(void* context);

    // `threads` in all, or as many as the system grants (fewer are slower, not wrong). Null when out of memory.
    static Pool* create(int threads);
    static void destroy(Pool* pool);

    int threads() const { return helpers_ + 1; }

    // Returns when `work(context)` has returned on every thread.
    void run(Work work, void* context);

   private:
    Pool() = default;
    static void* serve(void* pool);
    void start(int helpers);

    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;  // guards what follows
    pthread_cond_t started_ = PTHREAD_COND_INITIALIZER;
    pthread_cond_t finished_ = PTHREAD_COND_INITIALIZER;
    Work work_ = nullptr;
    void* context_ = nullptr;
    uint64_t round_ = 0;  // counts calls of run: a helper works once per round
    int busy_ = 0;        // helpers that have not finished this round
    bool closing_ = false;

    int helpers_ = 0;
    pthread_t* handles_ = nullptr;
};

}  // namespace megatrain
