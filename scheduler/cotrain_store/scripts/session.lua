-- session: open a session, or find the one there is. It counts while its client gives signs of life.
local session, of_tenant, living = KEYS[1], KEYS[2], KEYS[3]
local id, record, created_at, now_ms, beat_ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local max_sessions, tenant, max_record_bytes = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])

if redis.call('EXISTS', session) == 0 then
  redis.call('ZREMRANGEBYSCORE', living, '-inf', now_ms)
  if redis.call('ZCARD', living) >= max_sessions then
    return 'SESSIONS'
  end
  if record_bytes(tenant) >= max_record_bytes then
    return 'RECORDS'
  end
  count_record(tenant, record)
  redis.call('HSET', session, 'record', record)
  redis.call('ZADD', of_tenant, created_at, id)
  redis.call('ZADD', living, string.format('%.0f', now_ms + beat_ttl_ms), id)
end
return 'OK'
