//! `/v1/chat/completions`: answers, their ends, and the fields that shape them. Every answer is checked streamed and not.

use super::model::{CONTROL, EOS, FIRST_PIECE, IM_END, byte};
use super::server::{Server, Setup, with};
use serde_json::{Value, json};

/// (text, finish reason, completion tokens) of both forms, which must agree.
#[track_caller]
fn answer(server: &Server, fields: Value) -> (String, String, u64) {
    let whole = server.chat(fields.clone()).ok();
    let choice = &whole["choices"][0];
    let of_whole = (
        choice["message"]["content"].as_str().unwrap().to_owned(),
        choice["finish_reason"].as_str().unwrap().to_owned(),
        whole["usage"]["completion_tokens"].as_u64().unwrap(),
    );
    let streaming = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.chat(with(fields, streaming)).chunks();
    let (usage, chunks) = chunks.split_last().unwrap();
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    let last = &chunks.last().unwrap()["choices"][0];
    let of_stream = (
        text,
        last["finish_reason"].as_str().unwrap().to_owned(),
        usage["usage"]["completion_tokens"].as_u64().unwrap(),
    );
    assert_eq!(of_whole, of_stream, "streamed and not");
    of_whole
}

#[test]
fn a_whole_answer_has_openais_form() {
    let server = Setup::saying(&["Hello", ", you"]).start().ready();
    let body = server.chat(json!({})).ok();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "scripted");
    assert!(body["created"].as_u64().unwrap() > 1_600_000_000);
    assert!(
        body["system_fingerprint"]
            .as_str()
            .unwrap()
            .starts_with("strata-")
    );
    assert_eq!(
        body["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, you", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }])
    );
    let usage = &body["usage"];
    // <s>, `user: hi\n` and `=`; the space is the three bytes of U+2581, which is no piece here.
    assert_eq!(usage["prompt_tokens"], 13);
    // The end token counts.
    assert_eq!(usage["completion_tokens"], 3);
    assert_eq!(usage["total_tokens"], 16);
}

#[test]
fn the_prompt_is_what_tokenize_makes_of_the_rendered_chat() {
    let server = Setup::saying(&["x"]).start().ready();
    let rendered = "system: é\nuser: hi\n=";
    let tokens = server
        .post(
            "/tokenize",
            &json!({"content": rendered, "add_special": true}),
        )
        .ok();
    let body = server
        .chat(json!({"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]}))
        .ok();
    assert_eq!(
        body["usage"]["prompt_tokens"].as_u64().unwrap() as usize,
        tokens["tokens"].as_array().unwrap().len()
    );
}

#[test]
fn characters_that_come_in_pieces_are_sent_whole() {
    let emoji: Vec<u32> = "😀".bytes().map(byte).collect();
    let server = Setup::emitting(&emoji).start().ready();
    assert_eq!(
        answer(&server, json!({})),
        ("😀".to_owned(), "stop".to_owned(), 5)
    );
    let chunks = server.chat(json!({"stream": true})).chunks();
    let deltas: Vec<&str> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .filter(|delta| !delta.is_empty())
        .collect();
    assert_eq!(deltas, ["😀"]);
    // Cut inside the character.
    assert_eq!(
        answer(&server, json!({"max_tokens": 2})),
        ("\u{FFFD}".to_owned(), "length".to_owned(), 2)
    );
}

#[test]
fn bytes_that_are_no_text_stay_valid_json() {
    for bytes in [&[0xFFu8][..], &[0xC0, 0x80], &[0xED, 0xA0, 0x81]] {
        let tokens: Vec<u32> = bytes.iter().map(|&value| byte(value)).collect();
        let server = Setup::emitting(&tokens).start().ready();
        let (text, finish, _) = answer(&server, json!({}));
        assert_eq!(text, String::from_utf8_lossy(bytes));
        assert_eq!(finish, "stop");
    }
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let server = Setup::saying(&["al", "pha D", "EF", "GHx"]).start().ready();
    for (stop, text, tokens) in [
        (json!(["DEFG"]), "alpha ", 4),
        (json!("DEFG"), "alpha ", 4),
        (json!(["pha"]), "al", 2),
        (json!(["GH", "pha"]), "al", 2),
        (json!(["xyz"]), "alpha DEFGHx", 5),
        (json!(["x", "Hx"]), "alpha DEFG", 4),
    ] {
        let got = answer(&server, json!({"stop": stop}));
        assert_eq!(got, (text.to_owned(), "stop".to_owned(), tokens), "{stop}");
    }
    // Held back for a stop string that does not come, and cut off by length: text after all.
    assert_eq!(
        answer(&server, json!({"stop": ["DEFGHIJK"], "max_tokens": 3})),
        ("alpha DEF".to_owned(), "length".to_owned(), 3)
    );
}

#[test]
fn empty_stop_lists_and_strings_leave_the_models_own_end() {
    let server = Setup::saying(&["a", "b"]).start().ready();
    for stop in [json!(null), json!([]), json!(""), json!([""])] {
        let got = answer(&server, json!({"stop": stop}));
        assert_eq!(got, ("ab".to_owned(), "stop".to_owned(), 3), "{stop}");
    }
    let many: Vec<String> = (0..17).map(|i| format!("s{i}")).collect();
    assert_eq!(
        server.chat(json!({"stop": many})).error(400)["param"],
        "stop"
    );
}

#[test]
fn a_stop_string_may_be_a_control_token_or_a_character_of_several_tokens() {
    let server = Setup {
        pieces: vec!["a", "b"],
        ..Setup::emitting(&[FIRST_PIECE, CONTROL, FIRST_PIECE + 1])
    };
    let server = server.start().ready();
    assert_eq!(answer(&server, json!({})).0, "ab");
    assert_eq!(
        answer(&server, json!({"stop": "<|pause|>"})),
        ("a".to_owned(), "stop".to_owned(), 2)
    );
    let mut tokens = vec![byte(b'c')];
    tokens.extend("é".bytes().map(byte));
    tokens.push(byte(b'x'));
    let server = Setup::emitting(&tokens).start().ready();
    assert_eq!(answer(&server, json!({"stop": "é"})).0, "c");
}

#[test]
fn every_end_token_ends_the_turn_and_is_not_printed() {
    for end in [EOS, IM_END] {
        let server = Setup {
            pieces: vec!["a"],
            ..Setup::emitting(&[FIRST_PIECE, end])
        };
        let server = server.start().ready();
        assert_eq!(
            answer(&server, json!({})),
            ("a".to_owned(), "stop".to_owned(), 2)
        );
    }
}

#[test]
fn content_parts_are_joined_and_others_are_named() {
    let server = Setup::saying(&["x"]).start().ready();
    let prompt_tokens = |messages: Value| {
        server.chat(json!({"messages": messages})).ok()["usage"]["prompt_tokens"].clone()
    };
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    for role in ["user", "assistant", "tool", "system", "developer"] {
        assert_eq!(
            prompt_tokens(json!([{"role": role, "content": parts}])),
            prompt_tokens(json!([{"role": role, "content": "a\nb"}])),
            "{role}"
        );
    }
    prompt_tokens(
        json!([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]),
    );
    for (content, named) in [
        (json!([]), "empty"),
        (json!([{"type": "text"}]), "text"),
        (
            json!([{"type": "image_url", "image_url": {"url": "data:"}}]),
            "image_url",
        ),
        (json!(5), "content"),
    ] {
        let error = server
            .chat(json!({"messages": [{"role": "user", "content": content}]}))
            .error(400);
        assert_eq!(error["param"], "messages");
        assert!(
            error["message"].as_str().unwrap().contains(named),
            "{error}"
        );
    }
}

#[test]
fn messages_that_the_template_refuses_are_a_400_with_its_words() {
    let server = Setup::saying(&["x"]).start().ready();
    let message = |role: &str| json!({"role": role, "content": "hi"});
    let error = server
        .chat(json!({"messages": [message("user"), message("system")]}))
        .error(400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("the system comes first")
    );
    server.chat(json!({"messages": []})).error(400);
    server
        .chat(json!({"messages": [message("emperor")]}))
        .error(400);
    server.chat(json!({"messages": "hi"})).error(400);
    server.chat(json!({"messages": null})).error(400);
}

#[test]
fn log_probabilities_have_a_token_each() {
    let emoji: Vec<u32> = "😀".bytes().map(byte).collect();
    let mut tokens = vec![FIRST_PIECE];
    tokens.extend(&emoji);
    let setup = Setup {
        pieces: vec!["a"],
        ..Setup::emitting(&tokens)
    };
    let server = setup.start().ready();
    let fields = json!({"logprobs": true, "top_logprobs": 2, "temperature": 0});
    let whole = server.chat(fields.clone()).ok();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(content.len(), 5);
    assert_eq!(content[0]["token"], "a");
    assert_eq!(content[0]["bytes"], json!([97]));
    assert_eq!(content[1]["bytes"], json!([0xF0]));
    assert!(content[0]["logprob"].as_f64().unwrap() > -0.01);
    let top = content[0]["top_logprobs"].as_array().unwrap();
    assert_eq!((top.len(), &top[0]["token"]), (2, &json!("a")));
    let streamed: Vec<Value> = server
        .chat(with(fields, json!({"stream": true})))
        .chunks()
        .iter()
        .filter_map(|chunk| {
            chunk["choices"][0]["logprobs"]["content"]
                .as_array()
                .cloned()
        })
        .flatten()
        .collect();
    assert_eq!(streamed, content);
    server.chat(json!({"top_logprobs": 2})).error(400);
    server
        .chat(json!({"logprobs": true, "top_logprobs": 21}))
        .error(400);
    assert_eq!(
        server.chat(json!({})).ok()["choices"][0]["logprobs"],
        Value::Null
    );
}

#[test]
fn several_choices_are_several_sequences() {
    let server = Setup::saying(&["a", "b"]).start().ready();
    let body = server.chat(json!({"n": 3, "max_tokens": 1})).ok();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        assert_eq!(choice["message"]["content"], "a");
    }
    assert_eq!(body["usage"]["completion_tokens"], 3);
    assert_eq!(body["usage"]["prompt_tokens"], 13);
    let mut texts = [String::new(), String::new()];
    for chunk in server.chat(json!({"n": 2, "stream": true})).chunks() {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or(""));
    }
    assert_eq!(texts, ["ab", "ab"]);
}

#[test]
fn emoji_escapes_are_the_emoji() {
    let server = Setup::saying(&["x"]).start().ready();
    let headers = [("content-type", "application/json")];
    let send = |content: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#);
        super::client::call(
            server.address,
            "POST",
            "/v1/chat/completions",
            &headers,
            body.as_bytes(),
        )
    };
    let tokens = |content: &str| send(content).ok()["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens(r"\ud83d\ude00"), tokens("😀"));
    assert_eq!(tokens(r"a\u0000b"), tokens("abc"));
    assert_eq!(tokens("\u{FEFF}"), tokens("abc"));
    send(r"\ud83d").error(400);
    send(r"x \ude00").error(400);
}
