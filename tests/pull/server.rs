//! A server of HTTP on the loopback, as bad as each test wants it. One answer a connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Nobody takes so long to ask.
const PATIENCE: Duration = Duration::from_secs(60);

/// An address where nobody answers: the port is a system's own, and no test is given it.
pub(crate) const NOBODY: &str = "127.0.0.1:1";

#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// With its query.
    pub(crate) path: String,
    headers: Vec<(String, String)>,
    /// How many came before it.
    pub(crate) number: usize,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The first byte that is asked for; 0 where no range is.
    pub(crate) fn from(&self) -> usize {
        let range = self.header("range").unwrap_or("bytes=0-");
        let from = range.strip_prefix("bytes=").unwrap();
        from.strip_suffix('-').unwrap().parse().unwrap()
    }
}

pub(crate) struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    sent: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request, &mut Reply) + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let sent = Arc::new(AtomicU64::new(0));
        let ended = Arc::new(AtomicBool::new(false));
        let handler = Arc::new(handler);
        let accept = {
            let (requests, sent, ended) = (requests.clone(), sent.clone(), ended.clone());
            move || {
                for stream in listener.incoming() {
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                    let stream = stream.unwrap();
                    let (requests, handler) = (requests.clone(), handler.clone());
                    let mut reply = Reply {
                        stream: stream.try_clone().unwrap(),
                        sent: sent.clone(),
                        ended: ended.clone(),
                    };
                    std::thread::spawn(move || {
                        if let Some(request) = read(&stream, &requests) {
                            handler(&request, &mut reply);
                        }
                        let _ = stream.shutdown(Shutdown::Both);
                    });
                }
            }
        };
        Server {
            address,
            requests,
            sent,
            ended,
            listener: Some(std::thread::spawn(accept)),
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The same once there are so many: who does not wait for an answer may have left before its question was read.
    #[track_caller]
    pub(crate) fn requests_of(&self, count: usize) -> Vec<Request> {
        let began = Instant::now();
        loop {
            let requests = self.requests();
            if requests.len() >= count {
                return requests;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "no more than {}",
                requests.len()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Bytes of bodies that were sent, or are being sent just now.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(self.address));
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

fn read(stream: &TcpStream, requests: &Mutex<Vec<Request>>) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.strip_prefix("GET ")?.strip_suffix(" HTTP/1.1")?;
    let mut headers = Vec::new();
    for line in lines {
        let line = line.ok()?;
        match line.split_once(": ") {
            Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
            None => break,
        }
    }
    let mut requests = requests.lock().unwrap();
    let request = Request {
        path: path.to_owned(),
        headers,
        number: requests.len(),
    };
    requests.push(request.clone());
    Some(request)
}

pub(crate) struct Reply {
    stream: TcpStream,
    sent: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

impl Reply {
    /// A status and headers, as they are.
    pub(crate) fn head(&mut self, status: u16, headers: &[(&str, &str)]) {
        let mut text = format!("HTTP/1.1 {status} Whatever\r\nConnection: close\r\n");
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        self.raw(format!("{text}\r\n").as_bytes());
    }

    /// Who is asked may have left.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    pub(crate) fn body(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(64 << 10) {
            // Before they are sent: who has them all may ask at once how many there were.
            let bytes = piece.len() as u64;
            self.sent.fetch_add(bytes, Ordering::Relaxed);
            if self.stream.write_all(piece).is_err() {
                self.sent.fetch_sub(bytes, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Says nothing more until the other side closes.
    pub(crate) fn stall(&mut self) {
        let _ = self
            .stream
            .set_read_timeout(Some(Duration::from_millis(20)));
        let closed = |stream: &mut TcpStream| match stream.read(&mut [0; 1]) {
            Ok(_) => true,
            Err(error) => !matches!(
                error.kind(),
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
            ),
        };
        while !self.ended.load(Ordering::Relaxed) && !closed(&mut self.stream) {}
    }

    pub(crate) fn redirect(&mut self, status: u16, location: &str, headers: &[(&str, &str)]) {
        let headers = [&[("Location", location), ("Content-Length", "0")], headers].concat();
        self.head(status, &headers);
    }

    /// A small answer.
    pub(crate) fn answer(&mut self, status: u16, headers: &[(&str, &str)], body: &str) {
        let length = body.len().to_string();
        self.head(
            status,
            &[&[("Content-Length", length.as_str())], headers].concat(),
        );
        self.raw(body.as_bytes());
    }

    /// As a good server answers: a range where one is asked for and the version is still that one.
    pub(crate) fn file(&mut self, request: &Request, bytes: &[u8], version: &str) {
        self.file_until(request, bytes, version, bytes.len());
    }

    /// The same, but the connection is cut before this byte of the file.
    pub(crate) fn file_until(
        &mut self,
        request: &Request,
        bytes: &[u8],
        version: &str,
        end: usize,
    ) {
        let same = request
            .header("if-range")
            .is_none_or(|known| known == version);
        let from = if same { request.from() } else { 0 };
        let total = bytes.len();
        if from >= total {
            let range = format!("bytes */{total}");
            return self.answer(416, &[("Content-Range", &range)], "");
        }
        let length = (total - from).to_string();
        let range = format!("bytes {from}-{}/{total}", total - 1);
        let mut headers = vec![("Content-Length", length.as_str())];
        if !version.is_empty() {
            headers.push(("ETag", version));
        }
        let partial = same && request.header("range").is_some();
        if partial {
            headers.push(("Content-Range", &range));
        }
        self.head(if partial { 206 } else { 200 }, &headers);
        self.body(&bytes[from..end.max(from)]);
    }
}
