//! The least of an HTTP client, so that tests see every byte.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub(super) struct Response {
    pub(super) status: u16,
    headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl Response {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("bodies are UTF-8")
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The JSON of a success.
    #[track_caller]
    pub(super) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Checks the envelope and returns what is in it.
    #[track_caller]
    pub(super) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].clone();
        let mut fields: Vec<&String> = error.as_object().unwrap().keys().collect();
        fields.sort();
        assert_eq!(fields, ["code", "message", "param", "type"]);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|message| !message.is_empty())
        );
        error
    }

    /// The data of each event of a stream, `[DONE]` included.
    #[track_caller]
    pub(super) fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        self.text()
            .split_terminator("\n\n")
            .filter_map(|event| event.lines().find_map(|line| line.strip_prefix("data: ")))
            .map(str::to_owned)
            .collect()
    }

    /// The chunks of a stream that ended well.
    #[track_caller]
    pub(super) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }
}

pub(super) fn header<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    headers
        .iter()
        .find(|(given, _)| given == name)
        .map(|(_, value)| value.as_str())
}

/// An answer that is read as it comes.
pub(super) struct Stream {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
}

pub(super) fn connect(address: SocketAddr) -> TcpStream {
    try_connect(address).unwrap()
}

fn try_connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    // Only so that a broken server fails the test rather than hanging it.
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

/// Sends a request and reads the head of the answer.
pub(super) fn open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Stream {
    try_open(address, method, path, headers, body).unwrap()
}

/// The same where the server may be gone.
pub(super) fn try_open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<Stream> {
    let mut stream = try_connect(address)?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head.push_str("host: localhost\r\n");
    }
    if !body.is_empty() || method == "POST" {
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    try_read_head(stream)
}

pub(super) fn read_head(stream: TcpStream) -> Stream {
    try_read_head(stream).unwrap()
}

fn try_read_head(stream: TcpStream) -> io::Result<Stream> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .ok_or_else(|| io::Error::other(format!("no status in {line:?}")))?;
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    Ok(Stream {
        status,
        headers,
        reader,
    })
}

impl Stream {
    /// The next chunk of a chunked body; `None` after the last, or where the connection is cut.
    pub(super) fn chunk(&mut self) -> Option<String> {
        let mut size = String::new();
        self.reader.read_line(&mut size).ok()?;
        let size = usize::from_str_radix(size.trim(), 16).ok()?;
        let mut chunk = vec![0; size + 2];
        self.reader.read_exact(&mut chunk).ok()?;
        chunk.truncate(size);
        (size > 0).then(|| String::from_utf8(chunk).expect("every chunk is UTF-8"))
    }

    pub(super) fn finish(mut self) -> Response {
        let mut body = Vec::new();
        if header(&self.headers, "transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                body.extend_from_slice(chunk.as_bytes());
            }
        } else {
            self.reader.read_to_end(&mut body).unwrap();
        }
        Response {
            status: self.status,
            headers: self.headers,
            body,
        }
    }
}

/// A whole exchange.
pub(super) fn call(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Response {
    open(address, method, path, headers, body).finish()
}
