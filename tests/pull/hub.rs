//! Models by their names, from a hub of our own.

use super::process::Guard;
use super::server::{Reply, Request, Server};
use super::split::{Dealt, split};
use super::{IMPATIENT_AND_PERSISTENT, MODEL, OTHER, Place, assert_fetched, assert_refused, run};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LISTING: &str = "/api/models/o/r/revision/main?blobs=true";

const PARTS: [&str; 2] = [
    "F16/m-F16-00001-of-00002.gguf",
    "F16/m-F16-00002-of-00002.gguf",
];

/// As `sha256sum` has them.
const MODEL_SUM: &str = "26a087b4ac7971db5785aef3f813b4a107e54299acb8d244a982145ade060d3e";
const OTHER_SUM: &str = "e0266ef9f2a33ee11745443ff28494240437bb57cd951e640f1b26a2fcb4b58e";

fn large(path: &str, bytes: &[u8], sum: &str) -> Value {
    json!({"rfilename": path, "size": bytes.len(), "lfs": {"sha256": sum, "size": bytes.len()}})
}

fn sum(bytes: &[u8]) -> String {
    let sum = digest(&SHA256, bytes);
    let digits = sum.as_ref().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

/// A model in two files.
fn shards() -> &'static [Vec<u8>; 2] {
    static SHARDS: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    SHARDS.get_or_init(|| {
        let place = Place::new();
        let whole = place.path("m-F16.gguf");
        std::fs::write(&whole, MODEL).unwrap();
        let paths = split(&whole, 2, Dealt::InRuns);
        [0, 1].map(|number: usize| std::fs::read(&paths[number]).unwrap())
    })
}

/// The files of a repository.
fn siblings() -> Value {
    json!([
        {"rfilename": "README.md", "size": 5},
        large("m-Q8_0.gguf", OTHER, OTHER_SUM),
        large("m-Q4_K_M.gguf", MODEL, MODEL_SUM),
        large(PARTS[0], &shards()[0], &sum(&shards()[0])),
        large(PARTS[1], &shards()[1], &sum(&shards()[1])),
        large("../../evil.gguf", MODEL, MODEL_SUM),
    ])
}

/// Lists the files and sends those of them that are models, some by way of `elsewhere`.
fn answer(request: &Request, reply: &mut Reply, siblings: &Value, elsewhere: &str) {
    let path = request.path.as_str();
    if path == LISTING {
        let listing = json!({"sha": COMMIT, "siblings": siblings, "gated": false});
        return reply.answer(
            200,
            &[("Content-Type", "application/json")],
            &listing.to_string(),
        );
    }
    let Some(path) = path.strip_prefix(&format!("/o/r/resolve/{COMMIT}/")) else {
        return reply.answer(404, &[], "");
    };
    if let Some(part) = PARTS.iter().position(|part| *part == path) {
        return reply.file(request, &shards()[part], "\"p\"");
    }
    let is_other = path.contains("Q8_0");
    let (bytes, sum) = if is_other {
        (OTHER, OTHER_SUM)
    } else {
        (MODEL, MODEL_SUM)
    };
    match elsewhere {
        "" => reply.file(request, bytes, "\"x\""),
        _ => {
            let linked = format!("\"{sum}\"");
            let location = format!("{elsewhere}/{is_other}");
            reply.redirect(302, &location, &[("X-Linked-Etag", &linked)]);
        }
    }
}

fn hub() -> Server {
    Server::start(|request, reply| answer(request, reply, &siblings(), ""))
}

/// What large files are kept on.
fn store() -> Server {
    Server::start(|request, reply| {
        let bytes = if request.path == "/true" {
            OTHER
        } else {
            MODEL
        };
        reply.file(request, bytes, "\"stored\"");
    })
}

fn command(place: &Place, hub: &Server, name: &str, flags: &[&str]) -> Command {
    let mut command = place.command(name, flags);
    command.env("HF_ENDPOINT", hub.url("/"));
    command
}

#[test]
fn names_find_their_files() {
    let hub = hub();
    let check = |name: &str, file: &str, bytes: &[u8]| {
        let place = Place::new();
        let outcome = run(&mut command(&place, &hub, name, &[]));
        assert_fetched(&outcome, &place.path(file), bytes);
    };
    check("o/r", "m-Q4_K_M.gguf", MODEL);
    check("hf.co/o/r", "m-Q4_K_M.gguf", MODEL);
    check("o/r:q8_0", "m-Q8_0.gguf", OTHER);
    check("o/r/m-Q8_0.gguf", "m-Q8_0.gguf", OTHER);
    check(
        "https://huggingface.co/o/r/blob/main/m-Q8_0.gguf",
        "m-Q8_0.gguf",
        OTHER,
    );
    check(
        &hub.url("/o/r/resolve/main/m-Q8_0.gguf"),
        "m-Q8_0.gguf",
        OTHER,
    );
    let place = Place::new();
    let file = place.path("mine.gguf");
    let flags = ["--output", file.to_str().unwrap()];
    assert_fetched(
        &run(&mut command(&place, &hub, "o/r", &flags)),
        &file,
        MODEL,
    );
}

#[test]
fn all_parts_are_fetched() {
    let hub = hub();
    for name in ["o/r:F16", "o/r/F16/m-F16-00002-of-00002.gguf"] {
        let place = Place::new();
        let outcome = run(&mut command(&place, &hub, name, &[]));
        let files = ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"];
        let paths = files.map(|file| format!("{}\n", place.path(file).display()));
        assert_eq!(outcome.success(), paths.concat());
        assert_eq!(place.names(), files);
        for (file, bytes) in files.iter().zip(shards()) {
            assert!(std::fs::read(place.path(file)).unwrap() == *bytes);
        }
        assert!(
            !outcome.stderr.contains("cannot load"),
            "{}",
            outcome.stderr
        );
        // Those that are there are not asked for.
        let asked = hub.requests().len();
        std::fs::remove_file(place.path(files[1])).unwrap();
        run(&mut command(&place, &hub, name, &[])).success();
        assert_eq!(place.names(), files);
        assert_eq!(hub.requests().len(), asked + 2);
    }
    for flags in [["--output", "x.gguf"], ["--sha256", MODEL_SUM]] {
        let place = Place::new();
        let outcome = run(&mut command(&place, &hub, "o/r:F16", &flags));
        assert_refused(&outcome, 2, &place.path("x.gguf"), &["2 parts"]);
    }
}

#[test]
fn names_that_are_not_there() {
    let hub = hub();
    for (name, code, parts) in [
        ("llama", 2, ["no name of the hub", "owner/repo:Q4_K_M"]),
        ("../../etc/m.gguf", 2, ["letters", "owner/repo:Q4_K_M"]),
        ("o/r/../../evil.gguf", 2, ["another folder", "owner/repo"]),
        ("o/none", 1, ["o/none", "check the name"]),
        ("o/r:Q2_K", 1, ["no such model", "m-Q4_K_M.gguf"]),
        ("o/r/n.gguf", 1, ["no file n.gguf", "give o/r alone"]),
        ("o/r:m", 1, ["several models", "m-Q8_0.gguf"]),
    ] {
        let place = Place::new();
        let outcome = run(&mut command(&place, &hub, name, &[]));
        assert_refused(&outcome, code, &place.path("m.gguf"), &parts);
        assert!(!outcome.stderr.contains("evil.gguf,"), "{}", outcome.stderr);
        assert!(place.names().is_empty(), "{:?}", place.names());
    }
    // The status of a hub that knows nobody.
    for (token, part) in [("", "HF_TOKEN to a token"), ("t", "(HF_TOKEN) may not")] {
        let closed = Server::start(|_, reply| reply.answer(401, &[], "{}"));
        let place = Place::new();
        let outcome = run(command(&place, &closed, "o/r", &[]).env("HF_TOKEN", token));
        assert_refused(
            &outcome,
            1,
            &place.path("m.gguf"),
            &["o/r", "says 401", part],
        );
        assert_eq!(closed.requests().len(), 1);
    }
}

#[test]
fn listings_are_hostile() {
    for (listing, part) in [
        ("", "does not answer like the hub"),
        ("<html>", "does not answer like the hub"),
        ("[]", "does not answer like the hub"),
        ("{}", "has no GGUF file"),
        (
            r#"{"siblings": [{"rfilename": 3}]}"#,
            "does not answer like the hub",
        ),
        (
            r#"{"siblings": [{"rfilename": "../a.gguf"}]}"#,
            "has no GGUF file",
        ),
        (
            r#"{"siblings": [{"rfilename": "a/b\u0000c/a.gguf"}]}"#,
            "has no GGUF file",
        ),
        (
            r#"{"siblings": [{"rfilename": "a-00002-of-00002.gguf"}]}"#,
            "part 1 of 2 is missing",
        ),
    ] {
        let hub = Server::start(move |_, reply| reply.answer(200, &[], listing));
        let place = Place::new();
        let outcome = run(&mut command(&place, &hub, "o/r", &[]));
        assert_refused(&outcome, 1, &place.path("a.gguf"), &[part]);
        assert!(place.names().is_empty(), "{listing}: {:?}", place.names());
    }
    let endless = Server::start(|_, reply| {
        reply.head(200, &[]);
        for _ in 0..100 {
            reply.body(&[b' '; 1_000_000]);
        }
    });
    let place = Place::new();
    let outcome = run(&mut command(&place, &endless, "o/r", &[]));
    assert_refused(
        &outcome,
        1,
        &place.path("a.gguf"),
        &["more than 16777216 bytes"],
    );
    // A hub that is busy is asked again.
    let busy = Server::start(|request, reply| match request.number {
        0 => reply.answer(503, &[], ""),
        1 => reply.stall(),
        _ => answer(request, reply, &siblings(), ""),
    });
    let outcome = run(&mut command(
        &place,
        &busy,
        "o/r",
        &IMPATIENT_AND_PERSISTENT,
    ));
    assert_fetched(&outcome, &place.path("m-Q4_K_M.gguf"), MODEL);
}

/// What is whole is kept, whether or not it can be loaded.
#[test]
fn what_cannot_be_loaded_is_kept_and_said() {
    // One shard, by its address.
    let (hub, place) = (hub(), Place::new());
    let url = hub.url(&format!("/o/r/resolve/{COMMIT}/{}", PARTS[1]));
    let outcome = place.pull(&url, &[]);
    let path = place.path("m-F16-00002-of-00002.gguf");
    assert_fetched(&outcome, &path, &shards()[1]);
    assert!(
        outcome.stderr.contains("shard 1 of 2 is missing"),
        "{}",
        outcome.stderr
    );
    // A type that nothing computes with (20 is IQ4_NL), in all of a model or in a shard of it.
    let foreign = |bytes: &[u8]| {
        let name = b"blk.0.attn_q.weight";
        let at = bytes.windows(name.len()).position(|text| text == name);
        // After the name: the number of dimensions, two of them, the type.
        let at = at.unwrap() + name.len() + 4 + 2 * 8;
        let mut bytes = bytes.to_vec();
        bytes[at..at + 4].copy_from_slice(&20u32.to_le_bytes());
        bytes
    };
    let check = |names: [&'static str; 2], files: [Vec<u8>; 2]| {
        let sent = files.clone();
        let hub = Server::start(move |request, reply| {
            let found = |name: &&str| request.path.ends_with(name);
            match names.iter().position(found) {
                Some(file) => reply.file(request, &sent[file], "\"f\""),
                None => {
                    let siblings = names.map(|name| json!({"rfilename": name}));
                    answer(request, reply, &json!(siblings), "");
                }
            }
        });
        let place = Place::new();
        let outcome = run(&mut command(
            &place,
            &hub,
            &format!("o/r/{}", names[0]),
            &[],
        ));
        outcome.success();
        for part in ["whole and kept", "type IQ4_NL is not supported"] {
            let text = &outcome.stderr;
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
        assert!(std::fs::read(place.path(names[0])).unwrap() == files[0]);
    };
    let whole = foreign(MODEL);
    check(["m.gguf", "n.gguf"], [whole.clone(), whole]);
    let [first, second] = shards();
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    check(names, [foreign(first), second.clone()]);
}

#[test]
fn an_interrupt_between_parts_says_how_to_go_on() {
    let waits = Server::start(|request, reply| match request.path.ends_with(PARTS[1]) {
        true => reply.stall(),
        false => answer(request, reply, &siblings(), ""),
    });
    let place = Place::new();
    let mut command = command(&place, &waits, "o/r:F16", &["--stall-timeout", "60"]);
    let mut child = Guard(command.stderr(Stdio::piped()).spawn().unwrap());
    let began = Instant::now();
    while waits.requests().len() < 3 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing comes");
        std::thread::sleep(Duration::from_millis(5));
    }
    let id = child.0.id().to_string();
    let kill = Command::new("kill").args(["-s", "INT", &id]).status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().code(), Some(130));
    let text = std::io::read_to_string(child.0.stderr.take().unwrap()).unwrap();
    assert!(
        text.contains("are whole: run the same command again to go on"),
        "{text}"
    );
    assert!(place.path("m-F16-00001-of-00002.gguf").exists());
}

#[test]
fn parts_of_two_models_are_no_model() {
    let hub = Server::start(|request, reply| {
        let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        match request.path.contains("/resolve/") {
            true => reply.file(request, &shards()[0], "\"f\""),
            false => {
                let siblings = names.map(|name| json!({"rfilename": name}));
                answer(request, reply, &json!(siblings), "");
            }
        }
    });
    let place = Place::new();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    let parts = ["each file is whole", "no model", "shard of another model"];
    assert_refused(&outcome, 1, &place.path("m.gguf"), &parts);
}

#[test]
fn the_token_stays_with_the_hub() {
    let store = store();
    let elsewhere = store.url("");
    let hub = Server::start(move |request, reply| answer(request, reply, &siblings(), &elsewhere));
    let place = Place::new();
    let outcome = run(command(&place, &hub, "o/r", &[]).env("HF_TOKEN", "hf_secret"));
    assert_fetched(&outcome, &place.path("m-Q4_K_M.gguf"), MODEL);
    assert_eq!(hub.requests().len(), 2);
    for request in hub.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer hf_secret"));
    }
    assert_eq!(store.requests().len(), 1);
    assert_eq!(store.requests()[0].header("authorization"), None);
    // Nor is it sent to who is asked by URL, nor said.
    let place = Place::new();
    let flags = ["--output", place.folder.path().to_str().unwrap()];
    let url = store.url("/m.gguf");
    let outcome = run(command(&place, &hub, &url, &flags).env("HF_TOKEN", "hf_secret"));
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert_eq!(store.requests()[1].header("authorization"), None);
    assert!(!outcome.stderr.contains("hf_secret"));
    let outcome = run(command(&place, &hub, "o/r", &[]).env("HF_TOKEN", "a\nb"));
    assert_refused(
        &outcome,
        2,
        &place.path("m-Q4_K_M.gguf"),
        &["HF_TOKEN", "copy it again"],
    );
}

#[test]
fn sums_of_the_hub_are_checked() {
    // Of the list.
    let hub = Server::start(|request, reply| {
        let siblings = json!([large("m.gguf", MODEL, OTHER_SUM)]);
        answer(request, reply, &siblings, "");
    });
    let place = Place::new();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    let parts = ["SHA-256 is", MODEL_SUM, OTHER_SUM, "removed"];
    assert_refused(&outcome, 1, &place.path("m.gguf"), &parts);
    // Of the redirect, where the list has none.
    let store = Server::start(|request, reply| reply.file(request, OTHER, "\"1\""));
    let elsewhere = store.url("");
    let hub = Server::start(move |request, reply| {
        let siblings = json!([{"rfilename": "m.gguf"}]);
        answer(request, reply, &siblings, &elsewhere);
    });
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["SHA-256 is", MODEL_SUM],
    );
    // And sizes.
    let hub = Server::start(|request, reply| {
        let siblings = json!([large("m.gguf", OTHER, MODEL_SUM)]);
        answer(request, reply, &siblings, "");
    });
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["lists it with 329184"],
    );
    assert!(place.names().is_empty(), "{:?}", place.names());
}

#[test]
fn models_larger_than_the_disk() {
    let hub = Server::start(|request, reply| {
        let part = |number: u32| json!({"rfilename": format!("m-{number:05}-of-00002.gguf"), "size": 1u64 << 60});
        answer(request, reply, &json!([part(1), part(2)]), "");
    });
    let place = Place::new();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["not enough space", "make room"],
    );
    // Before anything is asked for.
    assert_eq!(hub.requests().len(), 1);
    assert!(place.names().is_empty(), "{:?}", place.names());
}

#[test]
fn what_is_there_is_known_by_its_sum() {
    let (hub, place) = (hub(), Place::new());
    let path = place.path("m-Q4_K_M.gguf");
    assert_fetched(&run(&mut command(&place, &hub, "o/r", &[])), &path, MODEL);
    let asked = hub.requests().len();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert!(
        outcome.stderr.contains("is there already"),
        "{}",
        outcome.stderr
    );
    // The list only.
    assert_eq!(hub.requests().len(), asked + 1);
    let mut damaged = MODEL.to_vec();
    damaged[100_000] ^= 1;
    std::fs::write(&path, damaged).unwrap();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert_eq!(outcome.status.code(), Some(1));
    assert!(outcome.stderr.contains("--force"), "{}", outcome.stderr);
    let outcome = run(&mut command(&place, &hub, "o/r", &["--force"]));
    assert_fetched(&outcome, &path, MODEL);
}

/// Behind the hub the address of a file is another each time, and so may its tag be.
#[test]
fn a_part_goes_on_from_another_commit() {
    let place = Place::new();
    let cut = Server::start(|request, reply| match request.path.as_str() {
        LISTING => answer(request, reply, &siblings(), ""),
        _ => reply.file_until(request, MODEL, "\"x\"", 100_000),
    });
    run(&mut command(&place, &cut, "o/r", &[]));
    let hub = hub();
    let outcome = run(&mut command(&place, &hub, "o/r", &[]));
    assert_fetched(&outcome, &place.path("m-Q4_K_M.gguf"), MODEL);
    assert_eq!(cut.sent() + hub.sent(), MODEL.len() as u64);
}
