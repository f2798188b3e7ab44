//! The endpoints file is followed while the picker runs, and a broken one changes nothing.

use crate::harness::client::chat;
use crate::harness::envoy::ORIGINAL_DST;
use crate::harness::picker::endpoints;
use crate::harness::{Stack, run};

#[test]
fn changes_take_effect_and_a_broken_file_does_not() {
    run(async {
        let Some(stack) = Stack::start("", 3, &[ORIGINAL_DST]).await else { return };
        let picker = &stack.picker;
        let [a, b, c] =
            [0, 1, 2].map(|i| (stack.upstreams[i].name.as_str(), stack.upstreams[i].address));
        let goes_to = async || {
            let answer = stack.answer(&chat("where?")).await;
            assert_eq!(answer.status, 200);
            answer.header("x-routed-to").unwrap().to_owned()
        };

        picker.set_endpoints(&endpoints([b]));
        picker.reaches("llm_ring_endpoints", "", 1.0).await;
        let version = picker.metrics().await.sum("llm_ring_pool_version_total", "");
        assert_eq!(goes_to().await, "b");

        for (errors, (broken, why)) in (1..).zip([
            ("endpoints:\n- {name: a, adress: 127.0.0.1, port: 1}", "did you mean `address`?"),
            ("endpoints: [", "endpoints.yaml"),
            ("", "endpoints.yaml"),
            ("endpoints:\n- {name: a, address: 127.0.0.1, port: 0}", "1 to 65535"),
        ]) {
            picker.set_endpoints(broken);
            picker.reaches("llm_ring_pool_errors_total", "", f64::from(errors)).await;
            let said = |line: &str| {
                (line.contains("the endpoints in use stay") && line.contains(why)).then_some(())
            };
            picker.process.line(why, said).await;
            assert_eq!(goes_to().await, "b", "after {broken:?}");
        }
        std::fs::remove_file(picker.folder().join("endpoints.yaml")).unwrap();
        picker.reaches("llm_ring_pool_errors_total", "", 5.0).await;
        assert_eq!(goes_to().await, "b");

        picker.set_endpoints(&endpoints([c]));
        picker.reaches("llm_ring_pool_version_total", "", version + 1.0).await;
        assert_eq!(goes_to().await, "c");

        picker.set_endpoints(&endpoints([a, b, c]));
        picker.reaches("llm_ring_endpoints", "", 3.0).await;
        assert_eq!(picker.metrics().await.sum("llm_ring_pool_errors_total", ""), 5.0);
    });
}
