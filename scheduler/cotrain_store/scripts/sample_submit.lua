-- sample_submit: accept one sample request. Twice is harmless. Without a place for its body (`ref`) it
-- only says ROOM for what it would take.
-- It goes to the lane of the one worker that has its weights while they are not stored, else to any.
local sample, sampler, session, weights_key, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local tenants, ring, refs, workers = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local request, tenant, sampler_id, digest, prefix = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local weights, ref, segment, size, body = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]
local accepted_at, clone, idle_ms = ARGV[11], ARGV[12], ARGV[13]
local max_requests, max_bytes, any_lane = tonumber(ARGV[14]), tonumber(ARGV[15]), ARGV[16]
local max_unread = tonumber(ARGV[17])

local known = redis.call('HGET', sample, 'digest')
if known then
  return known == digest and 'DUP' or 'CONFLICT'
end
if redis.call('EXISTS', sampler) == 0 then
  return 'GONE'
end
if redis.call('HEXISTS', session, 'finished_at') == 1 then
  return 'FINISHED'
end
local lane = any_lane
if weights ~= '' then
  local row = redis.call('HMGET', weights_key, 'worker', 'digest')
  if not row[1] then
    return 'GONE'
  end
  lane = row[2] == '' and row[1] or any_lane
end
local held = redis.call('HMGET', load, 'waiting', 'running', 'bytes')
if tonumber(held[1] or 0) + tonumber(held[2] or 0) >= max_requests
  or tonumber(held[3] or 0) + size > max_bytes then
  return 'BUSY'
end
if unread_bytes(tenant) >= max_unread then
  return 'UNREAD'
end
if ref == '' then
  return 'ROOM'
end

redis.call('HSET', sample, 'state', 'waiting', 'tenant', tenant, 'sampler', sampler_id,
  'clone', clone, 'digest', digest, 'prefix', prefix, 'lane', lane, 'weights', weights,
  'ref', ref, 'size', size, 'at', accepted_at)
if segment == '' then
  redis.call('HSET', sample, 'body', body)
else
  redis.call('HINCRBY', refs, segment, 1)
end
redis.call('RPUSH', prefix .. 'waiting:' .. lane .. ':' .. tenant, request)
if redis.call('HINCRBY', load, 'waiting', 1) == 1 then
  redis.call('RPUSH', ring, tenant)
end
redis.call('HINCRBY', load, 'bytes', size)
redis.call('SADD', tenants, tenant)
end_after(sampler, idle_ms)
list_sampler(tenant, sampler_id, idle_ms)
if lane == any_lane then
  for _, worker in ipairs(redis.call('SMEMBERS', workers)) do
    redis.call('PUBLISH', prefix .. 'notify:' .. worker, 'sample')
  end
else
  redis.call('PUBLISH', prefix .. 'notify:' .. lane, 'sample')
end
return 'NEW'
