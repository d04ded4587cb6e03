//! The limit on the size of files (`ulimit -f`).

#![expect(unsafe_code, reason = "sets what a signal does")]

/// From now on a write beyond the limit is an error, which is told like any other, and does not end the program by
/// signal.
pub(crate) fn let_writes_fail() {
    // SAFETY: no code of ours runs on the signal, and no thread runs yet that could set another action.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    debug_assert_ne!(before, libc::SIG_ERR, "the signal is a valid one");
}
