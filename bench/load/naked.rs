//! The floor: an ext_proc service that only answers, with endpoints in turn. Nothing in it is robust; it shows what
//! tonic and the gateway's protocol cost, so that what is above it is the picker's own.
//!
//! usage: `naked PORT THREADS ENDPOINT...`; THREADS as in `server.threads`: 0 is one a core.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program of the benchmark owns its tasks, and a fault may end it"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use envoy_types::pb::envoy::config::core::v3 as core;
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use pb::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use pb::{processing_request::Request as Said, processing_response::Response as Answer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Largest chunk sent back, as in the picker.
const CHUNK: usize = 62_000;

struct Naked {
    endpoints: Arc<Vec<String>>,
    turn: AtomicUsize,
}

#[tonic::async_trait]
impl ExternalProcessor for Naked {
    type ProcessStream = ReceiverStream<Result<pb::ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<pb::ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let (sender, receiver) = mpsc::channel(16);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.endpoints.len();
        let endpoints = Arc::clone(&self.endpoints);
        let mut inbound = request.into_inner();
        tokio::spawn(async move {
            let mut body = Vec::new();
            while let Ok(Some(message)) = inbound.message().await {
                for answer in answers(message, &mut body, &endpoints[turn]) {
                    let message =
                        pb::ProcessingResponse { response: Some(answer), ..Default::default() };
                    if sender.send(Ok(message)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn answers(message: pb::ProcessingRequest, body: &mut Vec<u8>, endpoint: &str) -> Vec<Answer> {
    match message.request {
        Some(Said::RequestHeaders(headers)) if headers.end_of_stream => vec![pick(endpoint)],
        Some(Said::RequestHeaders(_)) | None => Vec::new(),
        Some(Said::RequestBody(chunk)) => {
            body.extend_from_slice(&chunk.body);
            if !chunk.end_of_stream {
                return Vec::new();
            }
            let count = body.chunks(CHUNK).len();
            let chunks = (1..).zip(body.chunks(CHUNK));
            let echo =
                chunks.map(|(i, chunk)| Answer::RequestBody(streamed(chunk.to_vec(), i == count)));
            std::iter::once(pick(endpoint)).chain(echo).collect()
        }
        Some(Said::RequestTrailers(_)) => vec![Answer::RequestTrailers(Default::default())],
        Some(Said::ResponseHeaders(_)) => vec![Answer::ResponseHeaders(Default::default())],
        Some(Said::ResponseBody(chunk)) => {
            vec![Answer::ResponseBody(streamed(chunk.body, chunk.end_of_stream))]
        }
        Some(Said::ResponseTrailers(_)) => vec![Answer::ResponseTrailers(Default::default())],
    }
}

fn pick(endpoint: &str) -> Answer {
    let header = core::HeaderValue {
        key: "x-gateway-destination-endpoint".to_owned(),
        raw_value: endpoint.as_bytes().to_vec(),
        ..Default::default()
    };
    let option = core::HeaderValueOption { header: Some(header), ..Default::default() };
    let header_mutation =
        Some(pb::HeaderMutation { set_headers: vec![option], ..Default::default() });
    Answer::RequestHeaders(pb::HeadersResponse {
        response: Some(pb::CommonResponse { header_mutation, ..Default::default() }),
    })
}

fn streamed(body: Vec<u8>, end_of_stream: bool) -> pb::BodyResponse {
    let chunk = pb::StreamedBodyResponse { body, end_of_stream, ..Default::default() };
    let mutation = Some(pb::body_mutation::Mutation::StreamedResponse(chunk));
    let body_mutation = Some(pb::BodyMutation { mutation });
    pb::BodyResponse { response: Some(pb::CommonResponse { body_mutation, ..Default::default() }) }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let port: u16 = arguments.next().unwrap().parse().unwrap();
    let threads: usize = arguments.next().unwrap().parse().unwrap();
    let naked = Naked { endpoints: Arc::new(arguments.collect()), turn: AtomicUsize::new(0) };
    let mut runtime = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        runtime.worker_threads(threads);
    }
    let server = tonic::transport::Server::builder()
        .initial_connection_window_size(16 << 20)
        .initial_stream_window_size(1 << 20)
        .tcp_nodelay(true)
        .add_service(ExternalProcessorServer::new(naked))
        .serve(SocketAddr::from(([127, 0, 0, 1], port)));
    runtime.enable_all().build().unwrap().block_on(server).unwrap();
}
