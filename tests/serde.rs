//! Configs and answers survive a round trip through a user's own file.

use sparse_mla::{
    DecodeRequest, Family, KvCacheFormat, SparseMlaSm120DecodeConfig, explain_decode,
    supported_sparse_mla_sm120_configs,
};

#[test]
fn configs_round_trip_with_the_words_of_every_interface() {
    for format in [KvCacheFormat::Fp8, KvCacheFormat::Nvfp4] {
        for (family, config) in supported_sparse_mla_sm120_configs(format) {
            let text = serde_json::to_string(&(family, &config)).unwrap();
            assert!(text.contains(&format!("\"{family}\"")) && text.contains(&format!("\"{format}\"")), "{text}");
            let back: (Family, SparseMlaSm120DecodeConfig) = serde_json::from_str(&text).unwrap();
            assert_eq!(back, (family, config));
        }
    }
}

#[test]
fn answers_serialise_with_their_reasons() {
    let answer = explain_decode(&DecodeRequest::new(Family::Dsv4, 129, 512));
    let json: serde_json::Value = serde_json::to_value(&answer).unwrap();
    assert_eq!(json["kernel"], serde_json::Value::Null);
    assert_eq!(json["reasons"][0], "`num_heads` must be in [1, 128], got 129");
}
