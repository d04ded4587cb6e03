//! The program on a CUDA device, asked over HTTP.

use crate::client::Response;
use crate::device::device;
use crate::golden::TINY_MODELS;
use crate::program::{Page, Program, get, post, wait_until_ready};
use crate::run::{root, smollm2};
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use serde_json::{Value, json};
use strata::config::format_bytes;
use strata::memory::{Arena, in_words};

fn greedy(address: std::net::SocketAddr) -> Value {
    greedy_after(address, &json!("The capital of France is"))
}

fn greedy_after(address: std::net::SocketAddr, prompt: &Value) -> Value {
    let body = json!({
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 3,
    });
    let response: Response = post(address, "/v1/completions", &body);
    response.ok()["choices"][0].clone()
}

#[test]
fn smollm2_over_http_with_the_log_probabilities_of_the_cpu() {
    let Some(device) = device() else { return };
    drop(device);
    let model = smollm2();
    let common = ["--context", "64", "--parallel", "1", "--step-width", "8"];
    let flags = |own: &[&'static str]| [&common[..], own].concat();
    let mut on_cpu = Program::serve(&model, &flags(&["--device", "cpu"]));
    let on_device = [
        "--device",
        "cuda:0",
        "--device-memory",
        "48MiB",
        "--host-memory",
        "32MiB",
    ];
    let mut on_device = Program::serve(&model, &flags(&on_device));
    let ask = |program: &mut Program| {
        let address = program.address();
        wait_until_ready(address);
        (address, greedy(address))
    };
    let (_, expected) = ask(&mut on_cpu);
    let (address, answer) = ask(&mut on_device);
    assert_eq!(answer, expected, "text and log-probabilities");
    let memory = get(address, "/memory").ok();
    assert_eq!(memory["device"], "cuda");
    let page = Page::of(address);
    for way in [["storage", "host"], ["host", "device"]] {
        let [from, to] = way;
        let name = format!(r#"strata_transfer_bytes_total{{from="{from}",to="{to}"}}"#);
        assert!(page.value(&name) > 0.0, "{name}");
    }
}

#[test]
fn tiny_models_over_http_with_the_log_probabilities_of_the_cpu() {
    let Some(device) = device() else { return };
    drop(device);
    for name in TINY_MODELS {
        let model = root().join(format!("tests/data/tiny/{name}.gguf"));
        let answers = ["cpu", "cuda:0"].map(|device| {
            let flags = ["--context", "64", "--parallel", "1", "--device", device];
            let mut program = Program::serve(&model, &flags);
            let address = program.address();
            wait_until_ready(address);
            greedy_after(address, &json!([5, 70, 200, 250]))
        });
        assert_eq!(answers[0], answers[1], "{name}: text and log-probabilities");
    }
}

#[test]
fn where_little_memory_can_be_locked_it_says_so_and_serves() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU's driver has no such limit to set");
        return;
    }
    drop(device);
    let flags = [
        "--device",
        "cuda:0",
        "--device-memory",
        "48MiB",
        "--host-memory",
        "32MiB",
    ];
    let common = ["--context", "64", "--parallel", "1", "--step-width", "8"];
    let flags = [&flags[..], &common].concat();
    let limit = [("SOFTWARE_GPU_PINNED_MEMORY", "10MiB")];
    let mut program = Program::serve_with(&smollm2(), &flags, &limit);
    let address = program.address();
    wait_until_ready(address);
    let text = greedy(address)["text"].to_string();
    assert!(text.contains("Paris"), "{text}");
    let locked = get(address, "/memory").ok()["page_locked_bytes"].as_u64();
    let locked = locked.unwrap_or_default();
    assert!(
        (1 << 20..10 << 20).contains(&locked),
        "{locked} bytes are locked"
    );
    program.terminate();
    program.wait();
    let log = program.whole_log();
    let advice = ["LimitMEMLOCK", "--host-memory"];
    assert!(advice.iter().all(|words| log.contains(words)), "{log}");
}

#[test]
fn a_budget_beyond_what_is_free_is_refused_with_both_figures() {
    let Some(device) = device() else { return };
    let (free, _) = device.gpu.device.memory_bytes().unwrap();
    let is_software = device.software.is_some();
    drop(device);
    let model = root().join("tests/data/tiny/llama.gguf");
    let wanted = (free >> 20) + 100_000;
    let budget = format!("{wanted}MiB");
    let mut program = Program::serve(&model, &["--device", "cuda:0", "--device-memory", &budget]);
    assert_eq!(program.wait().code(), Some(2));
    let log = program.whole_log();
    let figures = [wanted << 20, free].map(format_bytes);
    for part in ["--device-memory", "free on the device", &figures[0]] {
        assert!(log.contains(part), "{part} in {log}");
    }
    if is_software {
        // Elsewhere others may have taken some meanwhile.
        assert!(log.contains(&figures[1]), "{figures:?} in {log}");
    }
}

/// The driver has no memory for a kernel while it serves: who asked is told, and the next one is answered.
#[test]
fn device_memory_that_runs_out_while_serving_fails_one_request() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU's driver refuses when it likes");
        return;
    }
    drop(device);
    let model = root().join("tests/data/tiny/llama.gguf");
    let flags = "--device cuda:0 --context 64 --parallel 1 --step-width 8";
    let flags: Vec<&str> = flags.split(' ').collect();
    // In the second request: a step takes some tens.
    let refused = [("SOFTWARE_GPU_REFUSED_LAUNCH", "70")];
    let mut program = Program::serve_with(&model, &flags, &refused);
    let address = program.address();
    wait_until_ready(address);
    let body = json!({"prompt": [5, 70, 200, 260], "max_tokens": 1, "temperature": 0});
    let answers: Vec<Response> = (0..6)
        .map(|_| post(address, "/v1/completions", &body))
        .collect();
    let failed = answers.iter().filter(|answer| answer.status == 500);
    assert_eq!(failed.count(), 1);
    let texts = answers.iter().filter(|answer| answer.status == 200);
    let mut texts = texts.map(|answer| answer.ok()["choices"][0]["text"].to_string());
    let first = texts.next().unwrap();
    assert_eq!(texts.filter(|text| *text == first).count(), 4);
    assert_eq!(get(address, "/health").status, 200);
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
    let log = program.whole_log();
    for part in ["OUT_OF_MEMORY", "give a smaller --device-memory"] {
        assert!(log.contains(part), "{part} in {log}");
    }
}

/// Another program may take what was free when the plan was made.
#[test]
fn memory_that_the_device_has_no_longer_is_refused_with_what_to_do() {
    let Some(device) = device() else { return };
    let (free, _) = device.gpu.device.memory_bytes().unwrap();
    let more = free as usize + (1 << 30);
    let error = Arena::on_cuda("device", more, &device.gpu.device).unwrap_err();
    let error = error.to_string();
    let bytes = more.to_string();
    for part in ["device arena", &bytes, "another program", "--device-memory"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(error.matches("first ").count(), 1, "one advice: {error}");
    // What the driver wants for itself.
    let told = in_words(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    for part in [
        "OUT_OF_MEMORY",
        " while ",
        "first give a smaller --device-memory",
    ] {
        assert!(told.contains(part), "{told}");
    }
    let other = in_words(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert!(!other.contains("--device-memory"), "{other}");
}

#[test]
fn a_device_that_is_not_there_is_exit_code_2() {
    let Some(device) = device() else { return };
    drop(device);
    let model = root().join("tests/data/tiny/llama.gguf");
    let mut program = Program::serve(&model, &["--device", "cuda:77"]);
    assert_eq!(program.wait().code(), Some(2));
    let log = program.whole_log();
    assert!(
        log.contains("cuda:77") && log.contains("--device cpu"),
        "{log}"
    );
}
