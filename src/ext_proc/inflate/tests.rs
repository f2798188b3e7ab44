use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use proptest::prelude::*;

use super::*;

#[derive(Default)]
struct Collected(Vec<u8>);

impl Sink for Collected {
    fn take(&mut self, piece: &[u8]) {
        self.0.extend_from_slice(piece);
    }
}

fn encode(coding: &str, body: &[u8]) -> Vec<u8> {
    match coding {
        "gzip" => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "deflate" => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "zstd" => zstd::encode_all(body, 1).unwrap(),
        _ => body.to_vec(),
    }
}

const CODINGS: [&str; 4] = ["identity", "gzip", "deflate", "zstd"];

fn decode(coding: &str, limit: u64, body: &[u8], chunk: usize) -> (Option<Stopped>, Vec<u8>) {
    let mut inflate = Inflate::new(Some(coding.as_bytes()), limit, Collected::default());
    for piece in body.chunks(chunk) {
        inflate.push(piece);
    }
    inflate.finish();
    inflate.finish();
    (inflate.stopped(), inflate.sink().0.clone())
}

#[test]
fn a_coding_is_known_by_its_names_in_any_case() {
    let body = b"who are you";
    for (header, coding) in [
        ("", "identity"),
        ("Identity", "identity"),
        ("GZIP", "gzip"),
        ("x-gzip", "gzip"),
        (" deflate ", "deflate"),
        ("zStd", "zstd"),
    ] {
        assert_eq!(
            decode(header, 100, &encode(coding, body), 5),
            (None, body.to_vec()),
            "{header}"
        );
    }
    for header in ["br", "gzip, gzip", "x-unknown", "gzip;q=1"] {
        assert_eq!(
            decode(header, 100, body, 5),
            (Some(Stopped::Unsupported), Vec::new()),
            "{header}"
        );
    }
}

#[test]
fn the_limit_lets_its_own_length_pass_and_not_a_byte_more() {
    for coding in CODINGS {
        for (length, stopped) in [
            (99, None),
            (100, None),
            (101, Some(Stopped::TooLarge)),
            (200, Some(Stopped::TooLarge)),
        ] {
            let body = encode(coding, &vec![b'x'; length]);
            let (seen, decoded) = decode(coding, 100, &body, 7);
            assert_eq!((seen, decoded.len()), (stopped, length.min(100)), "{coding} of {length}");
        }
    }
}

#[test]
fn a_bomb_stops_at_the_limit() {
    let bomb = vec![0; 50_000_000];
    for coding in ["gzip", "deflate", "zstd"] {
        let (stopped, decoded) = decode(coding, 1000, &encode(coding, &bomb), 65536);
        assert_eq!((stopped, decoded.len()), (Some(Stopped::TooLarge), 1000), "{coding}");
    }
}

#[test]
fn a_body_that_is_not_what_its_header_says_is_corrupt() {
    let text = b"{\"model\":\"m1\",\"prompt\":\"x\"}".repeat(50);
    for coding in ["gzip", "deflate", "zstd"] {
        assert_eq!(
            decode(coding, 9999, &text, 10).0,
            Some(Stopped::Corrupt),
            "plain text as {coding}"
        );
        let encoded = encode(coding, &text);
        for length in [1, encoded.len() / 2, encoded.len() - 1] {
            assert_eq!(
                decode(coding, 9999, &encoded[..length], 10).0,
                Some(Stopped::Corrupt),
                "{length} bytes of {coding}"
            );
        }
        assert_eq!(decode(coding, 9999, b"", 1).0, None, "nothing as {coding}");
    }
}

#[test]
fn too_large_a_zstd_window_is_refused() {
    for (log, stopped) in [(23, None), (24, Some(Stopped::Corrupt))] {
        let mut encoder = write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(log).unwrap();
        encoder.write_all(b"hello").unwrap();
        let body = encoder.finish().unwrap();
        assert_eq!(decode("zstd", 100, &body, 100).0, stopped, "window log {log}");
    }
}

#[test]
fn what_was_flushed_is_passed_on_at_once() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(b"data: 1\n\n").unwrap();
    gzip.flush().unwrap();
    let mut zstd = write::Encoder::new(Vec::new(), 1).unwrap();
    zstd.write_all(b"data: 1\n\n").unwrap();
    zstd.flush().unwrap();
    for (coding, body) in [("gzip", gzip.get_ref()), ("zstd", zstd.get_ref())] {
        let mut inflate = Inflate::new(Some(coding.as_bytes()), 100, Collected::default());
        inflate.push(body);
        assert_eq!(
            (inflate.stopped(), inflate.sink().0.as_slice()),
            (None, b"data: 1\n\n".as_slice()),
            "{coding}"
        );
    }
}

proptest! {
    #[test]
    fn any_chunks_give_the_same_bytes(body: Vec<u8>, again in 1_usize..50, coding in 0_usize..4, chunk in 1_usize..50) {
        let body = body.repeat(again);
        let encoded = encode(CODINGS[coding], &body);
        prop_assert_eq!(decode(CODINGS[coding], 1 << 20, &encoded, chunk), (None, body));
    }

    #[test]
    fn any_bytes_are_survived(mut body: Vec<u8>, flip: usize, coding in 0_usize..4) {
        decode(CODINGS[coding], 1000, &body, 16);
        body = encode(CODINGS[coding], &body);
        let at = flip % body.len().max(1);
        if let Some(byte) = body.get_mut(at) {
            *byte ^= 1 << (flip % 8);
        }
        decode(CODINGS[coding], 1000, &body, 16);
    }
}
