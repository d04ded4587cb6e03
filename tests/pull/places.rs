//! Where a file goes, and what is there already.

use super::server::Server;
use super::{MODEL, OTHER, Place, assert_fetched, assert_refused};
use std::path::Path;

const VERSION: &str = "\"1\"";

fn server() -> Server {
    Server::start(|request, reply| reply.file(request, MODEL, VERSION))
}

#[test]
fn a_folder_or_a_file() {
    let server = server();
    let url = server.url("/a/b%20c.gguf?download=true#x");
    let check = |output: &str, at: &str| {
        let place = Place::new();
        std::fs::create_dir(place.path("there")).unwrap();
        let output = format!("{}/{output}", place.folder.path().display());
        let outcome = place.pull(&url, &["--output", &output]);
        assert_fetched(&outcome, &place.path(at), MODEL);
    };
    check("there", "there/b c.gguf");
    check("there/", "there/b c.gguf");
    check("new/er/", "new/er/b c.gguf");
    check("m.gguf", "m.gguf");
    check("m", "m");
    // Where no folder is given it is models/ of the one that it runs in.
    let place = Place::new();
    let mut command = place.command(&url, &["--output", "models/"]);
    let outcome = super::run(command.current_dir(place.folder.path()));
    assert_eq!(outcome.success(), "models/b c.gguf\n");
    assert!(place.path("models/b c.gguf").exists());

    let place = Place::new();
    let missing = place.path("no/m.gguf");
    let outcome = place.pull(&url, &["--output", missing.to_str().unwrap()]);
    assert_refused(&outcome, 1, &missing, &["cannot write", "--output"]);
}

#[test]
fn names_in_urls_stay_in_the_folder() {
    let server = server();
    for path in [
        "/..%2f..%2fm.gguf",
        "/x/%2e%2e",
        "/%2fetc%2fm.gguf",
        "/a%5cb.gguf",
        "/a%00b.gguf",
        "/a%1b%5b31m.gguf",
        "/a%0am.gguf",
        "/%ff.gguf",
        "/.hidden.gguf",
        "/-o.gguf",
        "/download?file=m.gguf",
        "/",
        "",
    ] {
        let place = Place::new();
        let outcome = place.pull(&server.url(path), &[]);
        assert_refused(&outcome, 2, &place.path("m.gguf"), &["--output FILE.gguf"]);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        assert!(!outcome.stderr.contains('\u{1b}'), "{:?}", outcome.stderr);
        assert!(place.names().is_empty(), "{path}: {:?}", place.names());
    }
    assert!(server.requests().is_empty());
    // What the server calls it does not matter.
    let place = Place::new();
    let server = Server::start(|request, reply| match request.number {
        0 => {
            let name = (
                "Content-Disposition",
                "attachment; filename=\"../../evil.gguf\"",
            );
            reply.redirect(302, "/..%2f..%2fevil.gguf", &[name]);
        }
        _ => reply.file(request, MODEL, VERSION),
    });
    let outcome = place.pull(&server.url("/m.gguf"), &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let (server, place) = (server(), Place::new());
    let url = server.url("/m.gguf");
    let path = place.path("m.gguf");
    assert_fetched(&place.pull(&url, &[]), &path, MODEL);
    for flags in [&[][..], &["--force"]] {
        let outcome = place.pull(&url, flags);
        assert_fetched(&outcome, &path, MODEL);
        assert!(
            outcome.stderr.contains("is there already"),
            "{}",
            outcome.stderr
        );
    }
    // With a sum nobody is asked.
    let (_, sum) = place
        .pull(&url, &[])
        .stderr
        .split_once("SHA-256 ")
        .map_or_else(
            || panic!("no sum"),
            |(before, sum)| (before.to_owned(), sum[..64].to_owned()),
        );
    let asked = server.requests().len();
    let outcome = place.pull(&url, &["--sha256", &sum]);
    assert_fetched(&outcome, &path, MODEL);
    assert_eq!(server.requests().len(), asked);
}

#[test]
fn what_is_there_and_differs_is_replaced_only_by_force() {
    let (server, place) = (server(), Place::new());
    let url = server.url("/m.gguf");
    let path = place.path("m.gguf");
    let sum = "0".repeat(64);
    let check = |there: &[u8], flags: &[&str], part: &str| {
        std::fs::write(&path, there).unwrap();
        let outcome = place.pull(&url, flags);
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
        for part in ["is there already, and", part, "--force"] {
            assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
        }
        assert!(std::fs::read(&path).unwrap() == there, "{part}");
        assert_eq!(place.names(), ["m.gguf"]);
    };
    check(OTHER, &[], "has 329184 bytes, not 402976");
    check(MODEL, &["--sha256", &sum], "its SHA-256 is");
    std::fs::write(&path, OTHER).unwrap();
    assert_fetched(&place.pull(&url, &["--force"]), &path, MODEL);
    // A force that fails leaves what was there.
    std::fs::write(&path, OTHER).unwrap();
    let outcome = place.pull(&url, &["--force", "--sha256", &sum]);
    assert_eq!(outcome.status.code(), Some(1));
    assert!(std::fs::read(&path).unwrap() == OTHER);
}

/// Where the file system keeps a version with a file, a file of the same size is known to be another.
#[test]
fn another_version_of_the_same_size() {
    let server = Server::start(|request, reply| {
        let version = if request.number == 0 {
            "\"0\""
        } else {
            VERSION
        };
        reply.file(request, MODEL, version);
    });
    let place = Place::new();
    let url = server.url("/m.gguf");
    place.pull(&url, &[]).success();
    let outcome = place.pull(&url, &[]);
    if outcome.stderr.contains("only its size could be compared") {
        println!("skipped: no extended attributes here");
        return;
    }
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("another version"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn what_is_no_file_is_left_alone() {
    let (server, place) = (server(), Place::new());
    let url = server.url("/m.gguf");
    let flags = ["--output", "/dev/null"];
    let outcome = place.pull(&url, &flags);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("/dev/null is no file"),
        "{}",
        outcome.stderr
    );
    // A link in place of the part leads nowhere.
    let victim = place.path("victim");
    std::fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, place.path("m.gguf.part")).unwrap();
    let outcome = place.pull(&url, &[]);
    assert_refused(&outcome, 1, &place.path("m.gguf"), &["cannot write"]);
    assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
}

#[test]
fn what_cannot_be_written_keeps_what_has_come() {
    let (server, place) = (server(), Place::new());
    let url = server.url("/m.gguf");
    // A limit of 100 kB a file (in blocks of 512 bytes) stands for a disk that is full.
    let command = place.command(&url, &[]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -f 200; exec \"$@\"", "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let outcome = super::run(&mut limited);
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["cannot write", "m.gguf", "ulimit -f"],
    );
    let kept = place.path("m.gguf.part").metadata().unwrap().len();
    assert!(kept > 0 && kept <= 204_800, "{kept}");
    let outcome = place.pull(&url, &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert_eq!(server.requests()[1].from() as u64, kept);
}

#[test]
fn standard_output_that_is_full() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: no /dev/full here");
        return;
    }
    let (server, place) = (server(), Place::new());
    let mut command = place.command(&server.url("/m.gguf"), &[]);
    let stdout = std::fs::File::options().write(true).open(full).unwrap();
    let status = command
        .stdout(stdout)
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(std::fs::read(place.path("m.gguf")).unwrap() == MODEL);
}
