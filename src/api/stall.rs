//! A connection that gives up on a client that takes no bytes.
//!
//! Bodies are pulled: when the socket's buffer is full, nothing asks the body for more, its channel fills, and the
//! engine parks the sequence. That costs others nothing, but the sequence keeps its place and its pages. So a write that
//! makes no progress for the timeout is an error, which drops the connection, its body, and so the sequence.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

pub(super) struct StallGuard<S> {
    stream: S,
    timeout: Duration,
    timer: Pin<Box<Sleep>>,
    /// The timer runs: the last write could not take a byte.
    stalled: bool,
}

impl<S: AsyncWrite + Unpin> StallGuard<S> {
    pub(super) fn new(stream: S, timeout: Duration) -> StallGuard<S> {
        StallGuard {
            stream,
            timeout,
            timer: Box::pin(tokio::time::sleep(timeout)),
            stalled: false,
        }
    }

    fn watch<T>(&mut self, written: Poll<Result<T>>, context: &mut Context<'_>) -> Poll<Result<T>> {
        if written.is_ready() {
            self.stalled = false;
            return written;
        }
        if !self.stalled {
            self.stalled = true;
            self.timer.as_mut().reset(Instant::now() + self.timeout);
        }
        match self.timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(Error::new(
                ErrorKind::TimedOut,
                "the client takes no bytes",
            ))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn on_a_paused_clock(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
            .block_on(test);
    }

    #[test]
    fn a_client_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
        on_a_paused_clock(async {
            let (ours, mut theirs) = tokio::io::duplex(4);
            let mut ours = StallGuard::new(ours, Duration::from_secs(10));
            let writer = tokio::spawn(async move {
                let result = ours.write_all(&[0; 12]).await;
                (result, ours)
            });
            for _ in 0..2 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                theirs.read_exact(&mut [0; 4]).await.unwrap();
            }
            let (result, mut ours) = writer.await.unwrap();
            result.unwrap();
            // Its last four bytes are still there, and nobody reads.
            let started = Instant::now();
            let error = ours.write_all(&[0; 4]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert!(started.elapsed() >= Duration::from_secs(10));
        });
    }
}
