-- session: open a session, or return the existing one. It counts as live while its client sends heartbeats.
-- needs: records
local args = cjson.decode(ARGV[1])
local session, living = 'cotrain:session:' .. args.session, 'cotrain:tenant:' .. args.tenant .. ':living_sessions'

if redis.call('EXISTS', session) == 0 then
  redis.call('ZREMRANGEBYSCORE', living, '-inf', args.now_ms)
  if redis.call('ZCARD', living) >= args.max_sessions then
    return 'SESSIONS'
  end
  if record_bytes(args.tenant) >= args.max_record_bytes then
    return 'RECORDS'
  end
  count_record(args.tenant, args.record)
  redis.call('HSET', session, 'record', args.record, 'key', args.key)
  redis.call('ZADD', 'cotrain:tenant:' .. args.tenant .. ':sessions', args.created_at, args.session)
  redis.call('ZADD', living, string.format('%.0f', args.now_ms + args.heartbeat_ttl_ms), args.session)
end
return 'OK'
