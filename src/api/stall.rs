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

    /// Takes bytes at every other try, or never.
    struct Client {
        reads: bool,
        ready: bool,
    }

    impl AsyncWrite for Client {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<Result<usize>> {
            self.ready = self.reads && !self.ready;
            if self.ready {
                return Poll::Ready(Ok(bytes.len()));
            }
            if self.reads {
                context.waker().wake_by_ref();
            }
            Poll::Pending
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn write(reads: bool, timeout: Duration, times: usize) -> Result<usize> {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(async {
                let client = Client { reads, ready: true };
                let mut guard = StallGuard::new(client, timeout);
                let mut written = 0;
                for _ in 0..times {
                    written += std::future::poll_fn(|context| {
                        Pin::new(&mut guard).poll_write(context, b"abc")
                    })
                    .await?;
                }
                assert!(!guard.stalled);
                Ok(written)
            })
    }

    #[test]
    fn a_client_that_takes_nothing_is_given_up() {
        let error = write(false, Duration::from_millis(1), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_client_that_takes_bytes_in_between_is_not() {
        assert_eq!(write(true, Duration::from_secs(3600), 50).unwrap(), 150);
    }
}
