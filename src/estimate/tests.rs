use super::*;

const MLP: &str = "name = 'mlp'\n[mlp]\nlayers = [16, 1024, 1024, 8]\n";

fn subject(text: &str) -> Subject {
    Subject::from_card(text).unwrap()
}

fn card(file: &str) -> Subject {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    subject(&std::fs::read_to_string(path.join(file)).unwrap())
}

fn request(batch: u32) -> TrainingRequest {
    TrainingRequest {
        optimizer: Optimizer::Adam,
        precision: Precision::Fp32,
        batch,
        positions: 1,
        parallelism: Parallelism::NONE,
    }
}

/// Name and bytes of each part.
fn parts(training: &Training) -> Vec<(&'static str, u64)> {
    let saved = training.saved.iter();
    let figures = training.state.iter().chain(saved);
    figures.map(|figure| (figure.name, figure.bytes)).collect()
}

#[test]
fn adam_takes_sixteen_bytes_for_each_parameter() {
    for (parameters, size) in [
        (1_000_000u64, "15.3 MiB"),
        (7_000_000, "106.8 MiB"),
        (70_000_000, "1068.1 MiB"),
        (1_000_000_000, "14.9 GiB"),
    ] {
        let subject = subject(&format!("parameters = {parameters}"));
        let training = training(&subject, &request(1)).unwrap();
        assert_eq!(training.total_bytes, 16 * parameters);
        assert_eq!(training.saved, None);
        assert_eq!(binary_size(training.total_bytes), size);
        let report = training_report(&subject, &request(1), &training, &[]);
        assert!(report.contains(size), "{report}");
    }
}

#[test]
fn a_perceptron_takes_what_its_layers_say() {
    let subject = subject(MLP);
    assert_eq!(subject.parameters, 1_075_208);
    let adam = training(&subject, &request(64)).unwrap();
    assert_eq!(
        parts(&adam),
        [
            ("parameters", 4_300_832),
            ("gradients", 4_300_832),
            ("moments", 8_601_664),
            ("saved inputs", 528_384),
        ]
    );
    assert_eq!(adam.state_bytes, 17_203_328);
    assert_eq!(adam.total_bytes, 17_203_328 + 64 * (16 + 1024 + 1024) * 4);
    let saved = adam.saved.unwrap();
    assert_eq!(saved.formula, "64 samples x (16 + 1024 + 1024) x 4");

    let of = |optimizer, precision| {
        let request = TrainingRequest {
            optimizer,
            precision,
            ..request(64)
        };
        let training = training(&subject, &request).unwrap();
        (
            training.state_bytes / subject.parameters,
            training.saved.unwrap().bytes,
        )
    };
    assert_eq!(of(Optimizer::Sgd, Precision::Fp32), (8, 528_384));
    assert_eq!(of(Optimizer::SgdMomentum, Precision::Fp32), (12, 528_384));
    assert_eq!(
        of(Optimizer::Adam, Precision::Bf16),
        (2 + 2 + 4 + 8, 264_192)
    );
    assert_eq!(of(Optimizer::Sgd, Precision::Bf16), (2 + 2 + 4, 264_192));
    let without_bias = subject_of_widths("[16, 1024, 1024, 8]\nbias = false");
    assert_eq!(without_bias.parameters, 16 * 1024 + 1024 * 1024 + 1024 * 8);
}

fn subject_of_widths(widths: &str) -> Subject {
    subject(&format!("[mlp]\nlayers = {widths}"))
}

#[test]
fn a_pipeline_waits_at_its_ends() {
    for (stages, micro_batches, efficiency) in [
        (1, 1, 1.0),
        (4, 1, 0.25),
        (4, 4, 4.0 / 7.0),
        (4, 16, 16.0 / 19.0),
        (8, 64, 64.0 / 71.0),
    ] {
        assert_eq!(pipeline_efficiency(stages, micro_batches), efficiency);
    }
    // Eight equal layers without bias: two in each of four stages.
    let subject = subject_of_widths("[64, 64, 64, 64, 64, 64, 64, 64, 64]\nbias = false");
    let cut = Parallelism {
        pipeline: 4,
        micro_batches: 16,
        ..Parallelism::NONE
    };
    let request = TrainingRequest {
        parallelism: cut,
        ..request(32)
    };
    let training = training(&subject, &request).unwrap();
    assert_eq!(training.state_bytes, 16 * 2 * 64 * 64);
    assert_eq!(training.saved.unwrap().bytes, 32 * 2 * 64 * 4);
    assert_eq!(training.efficiency, 16.0 / 19.0);
}

/// Parameters and saved inputs of `MLP` under a cut, by name.
#[track_caller]
fn check(parallelism: Parallelism, wanted: &[(&'static str, u64)]) {
    let request = TrainingRequest {
        parallelism,
        ..request(64)
    };
    let training = training(&subject(MLP), &request).unwrap();
    assert_eq!(parts(&training), wanted, "{parallelism:?}");
}

#[test]
fn each_technique_divides_what_its_paper_says() {
    let none = Parallelism::NONE;
    let parameters = 1_075_208u64;
    let (p, saved) = (4 * parameters, 528_384);
    check(
        Parallelism {
            accumulate: 4,
            ..none
        },
        &[
            ("parameters", p),
            ("gradients", p),
            ("moments", 2 * p),
            ("saved inputs", saved / 4),
        ],
    );
    check(
        Parallelism { data: 8, ..none },
        &[
            ("parameters", p),
            ("gradients", p),
            ("moments", 2 * p),
            ("saved inputs", saved / 8),
        ],
    );
    // Shares of eight: 134,401 parameters.
    let share = 4 * parameters.div_ceil(8);
    for (zero, of_parameters, of_gradients) in [(1, p, p), (2, p, share), (3, share, share)] {
        check(
            Parallelism {
                data: 8,
                zero,
                ..none
            },
            &[
                ("parameters", of_parameters),
                ("gradients", of_gradients),
                ("moments", 2 * share),
                ("saved inputs", saved / 8),
            ],
        );
    }
}

#[test]
fn checkpoints_keep_the_inputs_of_runs_and_the_inside_of_one() {
    // Nine layers of 64: three runs of three. Kept 3 x 64; computed again 2 x 64.
    let subject = subject_of_widths("[64, 64, 64, 64, 64, 64, 64, 64, 64, 64]");
    let request = TrainingRequest {
        parallelism: Parallelism {
            checkpoint: true,
            ..Parallelism::NONE
        },
        ..request(10)
    };
    let training = training(&subject, &request).unwrap();
    assert_eq!(training.saved.unwrap().bytes, 10 * (3 + 2) * 64 * 4);
    assert_eq!(training.forward_passes, 2);
}

#[test]
fn sharing_sends_what_the_ring_says() {
    let sent = |zero| {
        let request = TrainingRequest {
            parallelism: Parallelism {
                data: 4,
                zero,
                ..Parallelism::NONE
            },
            ..request(64)
        };
        training(&subject("parameters = 1000"), &request)
            .unwrap()
            .traffic
            .bytes
    };
    assert_eq!(
        [sent(0), sent(1), sent(2), sent(3)],
        [6000, 6000, 6000, 9000]
    );
}

#[test]
fn a_transformer_is_counted_from_its_tensors() {
    let llama = card("llama-3.1-8b.toml");
    assert_eq!(llama.parameters, 8_030_261_248);
    let request = TrainingRequest {
        positions: 2048,
        ..request(2)
    };
    let training = training(&llama, &request).unwrap();
    assert_eq!(training.state_bytes, 16 * llama.parameters);
    // 32 layers of 4 E + q + k + v + o + heads + 3 F, then 2 E + V.
    let layer = 4 * 4096 + (4096 + 1024 + 1024 + 4096) + 32 + 3 * 14_336;
    let numbers = 32 * layer + 2 * 4096 + 128_256;
    assert_eq!(training.saved.unwrap().bytes, 2 * 2048 * numbers * 4);
    let names: Vec<String> = (techniques(&llama, &request).unwrap().into_iter())
        .map(|technique| technique.name)
        .collect();
    // Two samples are too few for four passes, eight devices or sixteen micro-batches.
    assert_eq!(names, ["checkpoints"]);
    assert_eq!(
        techniques(
            &llama,
            &TrainingRequest {
                batch: 64,
                ..request
            }
        )
        .unwrap()
        .len(),
        7
    );
}

#[test]
fn serving_takes_weights_cache_and_activations() {
    let llama = card("llama-3.1-8b.toml");
    let request = InferenceRequest {
        context: 8192,
        parallel: 1,
        kv_type: crate::placement::KvType::F16,
        step_width: Some(64),
    };
    let inference = inference(&llama, &request).unwrap();
    assert_eq!(binary_size(inference.weights.bytes), "4685.3 MiB");
    let size = |name: &str| {
        let found = inference.quantised.iter().find(|size| size.name == name);
        found.unwrap().bytes
    };
    assert_eq!(size("q4_k_m"), inference.weights.bytes);
    // All but norms and rope factors (66 tensors) in two bytes.
    let vectors = 65 * 4096 + 64;
    assert_eq!(
        size("f16"),
        2 * (llama.parameters - 65 * 4096) + 4 * vectors
    );
    let kv = inference.kv.as_ref().unwrap();
    assert_eq!((kv.token_bytes, kv.figure.bytes), (131_072, 1 << 30));
    assert_eq!(kv.of_context.last(), Some(&(131_072, 16 << 30)));
    let activations: u64 = inference
        .activations
        .iter()
        .map(|figure| figure.bytes)
        .sum();
    assert!(activations > 64 * 128_256 * 4 / 64, "{activations}");
    assert_eq!(
        inference.total_bytes,
        inference.weights.bytes + (1 << 30) + activations
    );

    let perceptron = super::inference(
        &subject(MLP),
        &InferenceRequest {
            parallel: 64,
            ..request
        },
    )
    .unwrap();
    assert_eq!(perceptron.total_bytes, 4_300_832 + 64 * 2048 * 4);
}

#[test]
fn layers_with_a_window_do_not_grow_with_the_context() {
    use crate::placement::{KvType, plan};
    let gemma = card("gemma-3-27b.toml");
    let SubjectKind::Transformer(model) = &gemma.kind else {
        panic!("{gemma:?}");
    };
    // 10 layers of 62 see everything. The others keep the window and a step, neither of which starts with a page.
    let (layer, page) = (16 * (128 + 128) * 2, 32);
    let window_pages = (1024u64 - 1 + 64).div_ceil(page) + 1;
    let with = |context: u64| {
        let pages = context.div_ceil(page);
        (10 * pages + 52 * pages.min(window_pages)) * page * layer
    };
    for (context, parallel) in [(256, 1), (8192, 1), (8192, 3), (131_072, 2)] {
        let request = InferenceRequest {
            context,
            parallel,
            kv_type: KvType::F16,
            step_width: Some(64),
        };
        let needs = inference(&gemma, &request).unwrap();
        let kv = needs.kv.as_ref().unwrap();
        assert_eq!(kv.token_bytes, 10 * layer);
        assert_eq!(
            kv.figure.bytes,
            u64::from(parallel) * with(u64::from(context))
        );
        let plan = plan(&model.gguf, &model.shape, &request.of_plan()).unwrap();
        assert_eq!(kv.figure.bytes, plan.kv.bytes());
        let scratch: u64 = plan.scratch.iter().map(|item| item.bytes).sum();
        assert_eq!(
            needs.total_bytes,
            needs.weights.bytes + plan.kv.bytes() + scratch
        );
        // Whatever context is asked for.
        let listed = [2048, 8192, 32_768, 131_072].map(|tokens| (tokens, with(tokens.into())));
        assert_eq!(kv.of_context, listed);
        let report = inference_report(&gemma, &needs);
        for part in [
            "(10 layers)",
            "(52 layers, a window of 1024 tokens and a step)",
            "= 81,920 bytes a token in the 10 layers that grow with the context; the other 52 keep a window of 1,024",
        ] {
            assert!(report.contains(part), "{report}");
        }
    }
}

#[test]
fn a_card_or_a_setting_that_cannot_be_is_named() {
    let refused = |text: &str, says: &str| {
        let error = Subject::from_card(text).unwrap_err().to_string();
        assert!(
            error.contains(says) && !error.contains('\n'),
            "{text}: {error}"
        );
    };
    refused("[mlp]\nlayers = []", "`mlp.layers` has 0 widths");
    refused("[mlp]\nlayers = [4]", "`mlp.layers` has 1 widths");
    refused("[mlp]\nlayers = [4, 0]", "`mlp.layers[1]` is 0");
    refused("[mlp]\nlayers = [-4, 4]", "`mlp.layers[0]` is -4");
    refused(
        "[mlp]\nlayers = [4, 99999999999]",
        "`mlp.layers[1]` is 99999999999",
    );
    refused("[mlp]\nlayers = [4, 99999999999999999999]", "(in `layers`)");
    refused("[mlp]\nlayers = [4, 4]\nwidth = 3", "unknown field `width`");
    refused(
        "[mlp]\nlayers = [4, 4]\n[rope]\nbase = 1.0",
        "unknown field `rope`",
    );
    refused("[mlp]\nlayers = 'x'", "(in `layers`)");
    refused("[mlp]", "missing field `layers`");
    refused("parameters = 0", "`parameters` is 0");
    refused(
        "parameters = 9223372036854775807",
        "`parameters` is 9223372036854775807",
    );
    refused(
        "parameters = 5\n[mlp]\nlayers = [1, 1]",
        "exclude each other",
    );
    refused("nothing = 1", "unknown field `nothing`");
    refused("= 1", "line 1");
    let wide = vec!["2147483648"; 200].join(", ");
    refused(&format!("[mlp]\nlayers = [{wide}]"), "`mlp.layers` makes");

    let refused = |request: TrainingRequest, says: &str| {
        let error = training(&subject(MLP), &request).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    let cut = |parallelism| TrainingRequest {
        parallelism,
        ..request(64)
    };
    let none = Parallelism::NONE;
    refused(request(0), "--batch is 0");
    refused(
        cut(Parallelism {
            pipeline: 4,
            ..none
        }),
        "--pipeline is 4; the model has 3 layers",
    );
    refused(
        cut(Parallelism { data: 65, ..none }),
        "--batch is 64; 65 devices",
    );
    refused(cut(Parallelism { zero: 4, ..none }), "--zero is 4");
    let micro = Parallelism {
        pipeline: 2,
        micro_batches: 65,
        ..none
    };
    refused(cut(micro), "--micro-batches is 65; a pass has 64 samples");

    // The largest of everything is an error and not a panic.
    let widest = vec!["16777216"; 3000].join(", ");
    let subject = subject_of_widths(&format!("[{widest}]"));
    let most = TrainingRequest {
        positions: u32::MAX,
        ..request(u32::MAX)
    };
    let error = training(&subject, &most).unwrap_err().to_string();
    assert!(error.contains("more than 2^64 bytes"), "{error}");
    let most = subject_parameters(1_000_000_000_000_000_000);
    assert_eq!(
        training(&most, &request(1)).unwrap().total_bytes,
        16_000_000_000_000_000_000
    );
}

fn subject_parameters(parameters: u64) -> Subject {
    subject(&format!("parameters = {parameters}"))
}
